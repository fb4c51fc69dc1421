"""Linear layers in FP8 on a GPU: products, captured and compiled steps, deliveries, against the same in plain torch."""

from __future__ import annotations

import copy
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from tiny_models import make_model, plain, prompts, reference_logprobs, request, run_out

from attention_cases import Case, check_decode, check_prefill
from headrace.bench.engine_checks import plain_twin
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.engines.base import Delta, Request
from headrace.engines.embedded.core import EngineCore
from headrace.models.fp8 import FP8, fp8_product, quantize_linears, quantize_rows
from headrace.models.loading import named_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CANARY = np.arange(1, 17, dtype=np.int32)
WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.08}


@pytest.mark.parametrize("tokens", [1, 2, 7, 48, 256, 1000])
def test_products_are_those_of_the_rounded_numbers(tokens: int) -> None:
    noise = torch.Generator("cuda").manual_seed(tokens)
    hidden = torch.randn(tokens, 512, generator=noise, device="cuda").bfloat16()
    weights = torch.randn(768, 512, generator=noise, device="cuda").bfloat16()
    values, scales = quantize_rows(weights)
    found = fp8_product(hidden, values, scales[:, 0])
    rows, of_rows = quantize_rows(hidden)
    expected = (rows.double() * of_rows.double()) @ (values.double() * scales.double()).t()
    # The sums have about 14 bits, and the result is rounded to bfloat16.
    assert ((found.double() - expected).norm() / expected.norm()).item() < 4e-3
    exact = hidden.double() @ weights.double().t()
    assert 0.01 < ((found.double() - exact).norm() / exact.norm()).item() < 0.06


def test_rounding_is_the_same_on_gpu_and_cpu() -> None:
    rows = torch.randn(512, 1024) * torch.logspace(-5, 5, 512)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        (values, scales), (mine, of_mine) = quantize_rows(rows.to(dtype)), quantize_rows(rows.to(dtype).cuda())
        torch.testing.assert_close(of_mine.cpu(), scales, rtol=1e-6, atol=0)
        assert (mine.cpu().float() != values.float()).float().mean() < 1e-3


def errors(asked: list[Request], done: dict[str, Delta], *models: Any) -> list[float]:
    """The mean error of the recorded log-probabilities against each of these models."""
    recorded = np.concatenate([done[each.id].logprobs for each in asked])
    return [float(np.abs(recorded - logprobs_by(model, asked, done)).mean()) for model in models]


def logprobs_by(model: Any, asked: list[Request], done: dict[str, Delta]) -> Any:
    """The log-probabilities of all sampled tokens by a forward pass of this model over the whole sequences."""
    found = []
    for each in asked:
        tokens = done[each.id].token_ids
        found.append(reference_logprobs(model, each.token_ids, tokens)[np.arange(len(tokens)), tokens])
    return np.concatenate(found)


@pytest.mark.parametrize("way", [(False, False), (True, False), (True, True)], ids=["plain", "graphs", "compiled"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "phi3"])
def test_logprobs_are_those_of_the_rounded_model(family: str, way: tuple[bool, bool]) -> None:
    model = make_model(family, **WIDE).bfloat16().cuda()
    full = plain(model).float()
    quantize_linears(model)
    # `float` also widens the FP8 numbers, which are then multiplied in float32.
    rounded, reference = plain(model), plain(model).float()
    config = EngineConfig(slots=8, block_size=16, graphs=way[0], compile=way[1], quantize="fp8")
    core = EngineCore(model, config, name="fp8", max_length=128, version=0)
    asked = [request(f"r{i}", prompt, 24, seed=i) for i, prompt in enumerate(prompts([3, 23, 9, 14, 40, 17, 30, 5]))]
    core.submit(asked)
    done = run_out(core)
    off, rounding = errors(asked, done, reference, full)
    # Inputs that differ by a rounding of bfloat16 may become neighbours in FP8, for Hugging Face's forward as well.
    theirs = float(np.abs(logprobs_by(rounded, asked, done) - logprobs_by(reference, asked, done)).mean())
    print(family, way, "mean error", off, "of a plain forward", theirs, "of the model in full", rounding)
    assert off < rounding and off < 1.3 * theirs
    core.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_over_a_cache_in_fp8_equals_float64(dtype: torch.dtype) -> None:
    case = Case((1, 0, 500, 170), kv_heads=2, group=4, size=128, dtype=dtype, stored=FP8)
    for splits in (1, 4):
        check_decode(case, device="cuda", splits=splits)
    check_prefill(case, (1, 0, 300, 170), device="cuda")


@pytest.mark.parametrize("way", [(False, False), (True, True)], ids=["plain", "compiled"])
def test_logprobs_with_keys_and_values_in_fp8(way: tuple[bool, bool]) -> None:
    model = make_model("qwen3", **WIDE).bfloat16().cuda()
    # Copied, because a twin shares its parameters with the model.
    reference, full = copy.deepcopy(plain_twin(model, rounds_kv=True)).float(), plain(model).float()
    config = EngineConfig(slots=8, block_size=16, graphs=way[0], compile=way[1], kv_dtype="fp8")
    core = EngineCore(model, config, name="fp8", max_length=128, version=0)
    asked = [request(f"r{i}", prompt, 24, seed=i) for i, prompt in enumerate(prompts([3, 23, 9, 14, 40, 17, 30, 5]))]
    core.submit(asked)
    off, rounding = errors(asked, run_out(core), reference, full)
    print(way, "mean error", off, "of the model in full", rounding)
    assert off < rounding and off < 0.1
    core.close()


class Trainer:
    def __init__(self, transport: str, directory: Path) -> None:
        settings = SenderSettings(run_id=uuid.uuid4().hex[:8], directory=directory, device="cuda")
        self._publisher = Publisher(sender(transport, settings), "bfloat16", None, CANARY)

    def publish(self, version: int) -> Manifest:
        model = plain(make_model("qwen3", seed=version, **WIDE)).bfloat16().cuda()

        def score(ids: np.ndarray) -> np.ndarray:
            table = reference_logprobs(model, ids[:1], ids[1:])
            return table[np.arange(len(ids) - 1), ids[1:]].astype(np.float32)

        manifest = self._publisher.publish(version, version - 1, version, named_weights(model), score).result(30)
        self._publisher.acknowledged(version - 1)
        return manifest

    def close(self) -> None:
        self._publisher.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer("shm", tmp_path / "weights")
    yield made
    made.close()


@pytest.mark.parametrize("staging", ["device", "host"])
def test_versions_are_rounded_as_they_arrive_and_proved(trainer: Trainer, staging: str) -> None:
    model: Any = make_model("qwen3", **WIDE).bfloat16().cuda()
    config = EngineConfig(slots=4, block_size=16, quantize="fp8", staging=staging)  # type: ignore[arg-type]
    core = EngineCore(model, config, name="fp8", max_length=128)
    for version in (1, 2, 3):
        manifest = trainer.publish(version)
        proof = core.swap(core.stage(manifest))
        assert proof.accepted, proof.reason
        assert proof.live_digest == proof.staged_digest == manifest.digest
        expected = make_model("qwen3", seed=version, **WIDE).bfloat16().cuda()
        quantize_linears(expected)
        live = named_weights(model)
        for name, tensor in named_weights(expected).items():
            assert torch.equal(live[name].float(), tensor.float()), name
    staged = core.stage(trainer.publish(4))
    assert staged.weights is not None
    damaged = next(tensor for tensor in staged.weights.values() if tensor.dtype == FP8)
    damaged.view(torch.uint8)[3, 5] ^= 1
    torch.cuda.synchronize()  # the engine copies on a stream of its own, which does not wait for this one
    proof = core.swap(staged)
    assert proof.quarantined and proof.reason.startswith("the live weights have digest")
    core.close()

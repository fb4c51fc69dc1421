"""An engine with linear layers in FP8: its tokens, and the proof of the weights that it really multiplies with."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import make_model, plain, prompts, reference_greedy, reference_logprobs, request, run_out
from transformers.models.llama import modeling_llama

from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest
from headrace.delivery.digest import digest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.engines.embedded.core import EngineCore
from headrace.errors import DeliveryError
from headrace.models.fp8 import Fp8Linear
from headrace.models.loading import named_weights

CANARY = np.arange(1, 17, dtype=np.int32)


def as_fp8(rows: torch.Tensor) -> torch.Tensor:
    """Rows that were rounded to FP8 with one scale for each, in float32."""
    scale = rows.abs().amax(-1, keepdim=True) / 448
    return (rows / scale).to(torch.float8_e4m3fn).float() * scale


def by_hand(model: Any) -> Any:
    """The plain model whose linear layers round their weights, once, and their inputs, always."""
    reference = plain(model)
    for name, layer in reference.model.named_modules():
        if type(layer) is torch.nn.Linear and not name.endswith((".gate", ".router")):
            layer.weight.data = as_fp8(layer.weight.data)
            layer.register_forward_pre_hook(lambda _, inputs: (as_fp8(inputs[0]),))
    return reference


def make_core(model: Any, version: int = -1, **config: Any) -> EngineCore:
    config = {"slots": 4, "block_size": 4, "prefill_chunk": 10, "quantize": "fp8"} | config
    return EngineCore(model, EngineConfig(**config), name="fp8", max_length=64, version=version)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "phi3", "mixtral"])
def test_tokens_and_logprobs_are_those_of_the_rounded_model(family: str) -> None:
    model = make_model(family)
    reference, unrounded = by_hand(model), plain(model)
    core = make_core(model, version=0)
    given = prompts([3, 23, 9, 14])
    requests = [request(f"r{i}", prompt, 12, temperature=0.0) for i, prompt in enumerate(given)]
    requests += [request(f"s{i}", given[2], 12, temperature=1.0, seed=i) for i in range(2)]
    core.submit(requests)
    done = run_out(core)
    off, rounding = [], []
    for asked in requests:
        delta = done[asked.id]
        if asked.sampling.temperature == 0:
            assert delta.token_ids.tolist() == reference_greedy(reference, asked.token_ids, 12)
        for model, errors in ((reference, off), (unrounded, rounding)):
            table = reference_logprobs(model, asked.token_ids, delta.token_ids)
            errors += np.abs(delta.logprobs - table[np.arange(12), delta.token_ids]).tolist()
    # A rounding error of float32 may let an input fall on the other side between two FP8 numbers, but rarely.
    assert np.median(off) < 1e-4 and np.mean(off) < 0.02, (np.median(off), np.mean(off))
    assert np.mean(rounding) > 10 * np.mean(off), "the plain model is another policy"
    core.close()


def test_keys_and_values_are_rounded_as_they_are_stored() -> None:
    """The reference attends over a cache that rounds what it is given; nothing else of it is rounded."""
    model = make_model("llama")
    reference, unrounded = plain(model), plain(model)
    for layer in reference.model.layers:
        # Values are rounded where they are made. Keys are rounded after the rotary embedding, so by `attend` below.
        layer.self_attn.v_proj.register_forward_hook(lambda _, __, out: out.to(torch.float8_e4m3fn).float())
    core = make_core(model, version=0, quantize="none", kv_dtype="fp8")
    asked = [request(f"r{i}", prompt, 12, seed=i) for i, prompt in enumerate(prompts([3, 23, 9, 14]))]
    core.submit(asked)
    done = run_out(core)
    off, rounding = [], []
    with rounded_keys():
        for each in asked:
            table = reference_logprobs(reference, each.token_ids, done[each.id].token_ids)
            off += np.abs(done[each.id].logprobs - table[np.arange(12), done[each.id].token_ids]).tolist()
    for each in asked:
        table = reference_logprobs(unrounded, each.token_ids, done[each.id].token_ids)
        rounding += np.abs(done[each.id].logprobs - table[np.arange(12), done[each.id].token_ids]).tolist()
    assert np.median(off) < 1e-4 and np.mean(off) < 0.005, (np.median(off), np.mean(off))
    assert np.mean(rounding) > 10 * np.mean(off)
    core.close()


@contextmanager
def rounded_keys() -> Iterator[None]:
    """Let Llama's rotary embedding round the keys that it returns."""
    rotate = modeling_llama.apply_rotary_pos_emb

    def rounding(*given: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = rotate(*given, **named)
        return query, key.to(torch.float8_e4m3fn).float()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", rounding)
        yield


class Trainer:
    """Publishes versions: version v is the random model of seed v. Canaries are scored by the model in full."""

    def __init__(self, transport: str, directory: Path) -> None:
        settings = SenderSettings(run_id=uuid.uuid4().hex[:8], directory=directory)
        self._publisher = Publisher(sender(transport, settings), "float32", None, CANARY)

    def publish(self, version: int) -> Manifest:
        model = plain(make_model("llama", seed=version))

        def score(ids: np.ndarray) -> np.ndarray:
            table = reference_logprobs(model, ids[:1], ids[1:])
            return table[np.arange(len(ids) - 1), ids[1:]].astype(np.float32)

        manifest = self._publisher.publish(version, version - 1, version, named_weights(model), score).result(30)
        self._publisher.acknowledged(version - 1)
        return manifest

    def close(self) -> None:
        self._publisher.close()


@pytest.fixture
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trainer]:
    made = Trainer(getattr(request, "param", "shm"), tmp_path / "weights")
    yield made
    made.close()


@pytest.mark.parametrize("trainer", ["shm", "file"], indirect=True)
def test_versions_are_rounded_as_they_arrive_and_proved(trainer: Trainer) -> None:
    model = make_model("llama")
    core = make_core(model)
    prompt = prompts([7])[0]
    for version in (1, 2, 3):
        manifest = trainer.publish(version)
        proof = core.swap(core.stage(manifest))
        assert proof.accepted, proof.reason
        assert proof.live_digest == proof.staged_digest == manifest.digest
        assert 1e-4 < proof.canary_error < 0.5, "rounded weights do not score as the trainer does"
        reference = by_hand(make_model("llama", seed=version))
        core.submit([request(f"r{version}", prompt, 10, temperature=0.0)])
        delta = run_out(core)[f"r{version}"]
        assert delta.token_ids.tolist() == reference_greedy(reference, prompt, 10)
        assert set(delta.versions.tolist()) == {version}
    assert not any(p.dtype == torch.float32 for n, p in model.named_parameters() if n.endswith("proj.weight"))
    core.close()


def test_damage_on_the_way_is_rejected_and_changes_nothing(trainer: Trainer) -> None:
    model = make_model("llama")
    core = make_core(model)
    assert core.swap(core.stage(trainer.publish(1))).accepted
    held = digest(named_weights(model).items())
    manifest = trainer.publish(2)
    with pytest.raises(DeliveryError, match="arrived wrong"):
        core.stage(_with_digest(manifest, manifest.digest ^ 1))
    assert core.version == 1 and not core.quarantined
    assert digest(named_weights(model).items()) == held
    core.close()


@pytest.mark.parametrize("name", ["mlp.down_proj.weight", "self_attn.k_proj.weight_scale", "input_layernorm.weight"])
def test_a_damaged_live_weight_is_found(trainer: Trainer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.delivery import receiver

    model = make_model("llama")
    core = make_core(model)
    assert core.swap(core.stage(trainer.publish(1))).accepted
    copied = receiver.copy_all

    def damaging(targets: dict[str, torch.Tensor], sources: Any, **named: Any) -> None:
        copied(targets, sources, **named)
        targets[f"model.layers.1.{name}"].view(torch.uint8).view(-1)[5] ^= 1

    staged = core.stage(trainer.publish(2))
    monkeypatch.setattr(receiver, "copy_all", damaging)
    proof = core.swap(staged)
    assert proof.quarantined and not proof.accepted and core.version == -1
    assert proof.reason.startswith("the live weights have digest") and proof.live_digest != proof.staged_digest
    monkeypatch.undo()
    assert core.swap(core.stage(trainer.publish(3))).accepted
    core.close()


def test_the_canary_finds_that_other_weights_are_multiplied(trainer: Trainer) -> None:
    model = make_model("llama")
    core = make_core(model)
    assert core.swap(core.stage(trainer.publish(1))).accepted
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, Fp8Linear)
    layer.weight_scale = layer.weight_scale * 2  # The layer no longer multiplies with the memory that is delivered to.
    proof = core.swap(core.stage(trainer.publish(2)))
    assert proof.quarantined and proof.live_digest == proof.staged_digest
    assert proof.reason.startswith("the canary is off by")
    core.close()


def test_a_change_to_another_version_is_refused(trainer: Trainer) -> None:
    core = make_core(make_model("llama"))
    manifest = trainer.publish(1)
    manifest.kind, manifest.base = "delta", 0
    with pytest.raises(DeliveryError, match="is a change, and this engine does not keep what the change is made to"):
        core.stage(manifest)
    core.close()


def _with_digest(manifest: Manifest, wrong: int) -> Manifest:
    manifest.digest = wrong
    return manifest

"""Every family on the GPU, captured and compiled or not: tokens in float32, log-probabilities in bfloat16."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from tiny_models import FAMILIES, make_model, plain, prompts, reference_greedy, reference_logprobs, request, run_out
from transformers import AutoModelForCausalLM, Qwen3Config

from headrace.config.schema import EngineConfig
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.models.attention import ATTENTION, check_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WAYS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.fixture(params=WAYS, ids=lambda way: f"graphs={way[0]},compile={way[1]}")
def way(request: pytest.FixtureRequest) -> dict[str, bool]:
    return {"graphs": request.param[0], "compile": request.param[1]}


def engine(model: Any, max_length: int = 64, **config: Any) -> EngineCore:
    return EngineCore(model, EngineConfig(**config), name="gpu", max_length=max_length, version=0)


COMPILED = {"llama", "qwen3", "gemma2", "mistral", "qwen3_moe", "gpt_oss"}
"""Families that are compiled too: one for every kind of attention and of feed-forward layer."""


@pytest.mark.parametrize(
    ("family", "way"),
    [(family, way) for family in FAMILIES for way in WAYS if not way[1] or family in COMPILED],
    indirect=["way"],
)
def test_greedy_equals_generate_and_logprobs_equal_a_forward(family: str, way: dict[str, bool]) -> None:
    model = make_model(family).cuda()
    check_model(model)
    reference = plain(model)
    core = engine(model, slots=4, block_size=4, prefill_chunk=10, cache_tokens=56, **way)
    given = prompts([3, 23, 9, 1, 14, 11])
    requests = [request(f"r{i}", prompt, 18, temperature=0.0) for i, prompt in enumerate(given)]
    requests += [request(f"g{i}", given[4], 12, group="g", temperature=1.0, seed=i) for i in range(3)]
    core.submit(requests)
    done = run_out(core)
    assert core.counters().preemptions > 0
    assert core.counters().free_blocks == core.counters().total_blocks
    for r in requests:
        delta = done[r.id]
        if r.sampling.temperature == 0:
            assert delta.token_ids.tolist() == reference_greedy(reference, r.token_ids, 18)
        table = reference_logprobs(reference, r.token_ids, delta.token_ids)
        expected = table[np.arange(len(delta.token_ids)), delta.token_ids]
        np.testing.assert_allclose(delta.logprobs, expected, atol=1e-4)


def half_precision_model() -> Any:
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        initializer_range=0.02,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION).eval()


def test_half_precision_is_close_to_the_same_weights_in_float32(way: dict[str, bool]) -> None:
    """Mean and largest error of log-probabilities; greedy tokens wherever the best two are farther apart than that."""
    model = half_precision_model()
    exact = plain(model).float()
    core = engine(model, max_length=512, slots=64, **way)
    rng = np.random.default_rng(0)
    asked = [
        Request(
            id=str(i),
            token_ids=rng.integers(0, 8192, 20 + i).astype(np.int32),
            sampling=Sampling(max_tokens=128, temperature=float(i % 2), seed=i),
        )
        for i in range(64)
    ]
    core.submit(asked)
    done = run_out(core)
    errors, wrong = [], 0
    for r in asked[::4] + asked[1::4]:
        answer = done[r.id].token_ids
        ids = torch.tensor(np.concatenate([r.token_ids, answer]).astype(np.int64), device="cuda")
        with torch.inference_mode():
            logits = exact(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=len(answer)).logits[0]
        table = torch.log_softmax(logits.float(), -1)
        expected = table.gather(1, ids[-len(answer) :, None])[:, 0].cpu().numpy()
        errors.append(np.abs(expected - done[r.id].logprobs))
        if r.sampling.temperature == 0:
            best = table.topk(2, -1)
            clear = (best.values[:, 0] - best.values[:, 1]) > 5e-2
            wrong += int(((best.indices[:, 0] != ids[-len(answer) :]) & clear).sum())
    found = np.concatenate(errors)
    assert found.mean() <= 5e-3 and found.max() <= 5e-2, (found.mean(), found.max())
    assert wrong == 0


def test_forks_from_a_far_pivot_cost_no_prefill_and_equal_fresh_runs(way: dict[str, bool]) -> None:
    model = make_model("qwen3", max_position_embeddings=4096).cuda()
    core = engine(model, max_length=4096, slots=16, **way)
    prompt = prompts([40])[0]
    core.submit([request("parent", prompt, 3000, seed=3)])
    answers: dict[str, list[Delta]] = {}
    while not answers.get("parent") or sum(len(d.token_ids) for d in answers["parent"]) < 2100:
        for delta in core.step():
            answers.setdefault(delta.id, []).append(delta)
    forks = core.fork("parent", 2000, 8)
    before = core.counters().prefilled_tokens
    core.submit([_shorter(fork, 50) for fork in forks])
    done = run_out(core)
    assert core.counters().prefilled_tokens == before
    fresh = engine(model, max_length=4096, slots=16, **way)
    fresh.submit([_shorter(fork, 50, parent="") for fork in forks])
    expected = run_out(fresh)
    for fork in forks:
        assert done[fork.id].token_ids.tolist() == expected[fork.id].token_ids.tolist()
        np.testing.assert_allclose(done[fork.id].logprobs, expected[fork.id].logprobs, atol=1e-4)


def _shorter(fork: Request, tokens: int, parent: str | None = None) -> Request:
    sampling = fork.sampling
    return Request(
        id=fork.id,
        token_ids=fork.token_ids,
        sampling=Sampling(max_tokens=tokens, temperature=sampling.temperature, seed=sampling.seed),
        parent=fork.parent if parent is None else parent,
    )

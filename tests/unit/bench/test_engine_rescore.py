"""The reference scores of the engine benchmark."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from headrace.bench.delivery_sides import two_sets
from headrace.bench.engine_checks import (
    check_tags,
    chosen_rows,
    divergence,
    plain_twin,
    replay,
    rescore,
    sampled_distribution,
    widened_twin,
)
from headrace.engines.base import Delta, Request, Sampling
from headrace.models.attention import ATTENTION
from headrace.models.loading import named_weights

PROBABILITIES = np.array([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.0, "top_k": 1}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.8}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),  # of the three best, the mass is 0.9
    ],
)
def test_the_distribution_is_tempered_then_cut(changes: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor(np.log(PROBABILITIES) + 3.0)[None]
    found = sampled_distribution(logits, Sampling(max_tokens=1, **changes)).exp()[0]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def request_of(prompt: np.ndarray) -> Request:
    return Request(id="r", token_ids=prompt, sampling=Sampling(max_tokens=1))


def answer_of(tokens: np.ndarray, logprobs: np.ndarray, versions: np.ndarray) -> Delta:
    return Delta(id="r", token_ids=tokens, logprobs=logprobs, versions=versions)


@given(count=st.integers(1, 300), share=st.floats(0, 1))
def test_chosen_rows_are_a_share_spread_over_the_batch(count: int, share: float) -> None:
    requests: Any = range(count)
    rows: Any = chosen_rows(requests, requests, share)
    chosen = [request for request, answer in rows if request == answer]
    assert len(chosen) == len(set(chosen)) == len(rows) == max(1, min(count, round(count * share)))
    assert chosen == sorted(chosen) and chosen[0] >= 0 and chosen[-1] < count


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=None,
        bos_token_id=None,
        attn_implementation=ATTENTION,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def test_the_twin_shares_parameters_and_leaves_the_model_alone(model: Any) -> None:
    twin = plain_twin(model)
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    assert all(ours[name].data_ptr() == theirs[name].data_ptr() for name in ours)
    assert model.config._attn_implementation == ATTENTION
    assert twin.config._attn_implementation == "sdpa"


def by_hand(model: Any, prompt: np.ndarray, tokens: np.ndarray, weights: dict[str, torch.Tensor]) -> np.ndarray:
    """Token by token with these weights, every pass over the whole prefix."""
    twin = plain_twin(model)
    found = []
    with torch.no_grad():
        for i, token in enumerate(tokens):
            ids = torch.tensor(np.concatenate([prompt, tokens[:i]]), dtype=torch.long)[None]
            logits = torch.func.functional_call(twin, weights, (ids,), {"use_cache": False}).logits[0, -1]
            found.append(float(torch.log_softmax(logits.double(), -1)[token]))
    return np.array(found)


def test_errors_are_the_distance_from_the_plain_model(model: Any) -> None:
    prompt, tokens = np.arange(3, dtype=np.int32), np.array([5, 7, 60, 2], np.int32)
    exact = by_hand(model, prompt, tokens, {})
    shift = np.array([0.0, 0.5, -0.25, 0.0])
    answer = answer_of(tokens, (exact + shift).astype(np.float32), np.zeros(4, np.int32))
    found = rescore(plain_twin(model), [(request_of(prompt), answer)])
    assert found["mean_error"] == pytest.approx(0.1875, abs=1e-5)
    assert found["max_error"] == pytest.approx(0.5, abs=1e-5)
    assert (found["rows"], found["tokens"], found["outside"]) == (1, 4, 0)


def test_a_wrong_tag_is_seen(model: Any) -> None:
    """Under one version the replay is the plain forward of its weights; a token tagged otherwise is counted."""
    twin, sets = plain_twin(model), two_sets(named_weights(model), 0)
    prompt, tokens = np.arange(3, dtype=np.int32), np.array([5, 7, 60, 2, 9], np.int32)
    logprobs = by_hand(model, prompt, tokens, sets[1]).astype(np.float32)
    odd = answer_of(tokens, logprobs, np.full(5, 3, np.int32))
    np.testing.assert_allclose(replay(twin, sets, request_of(prompt), odd), logprobs, atol=1e-5)

    def mis_tagged(versions: list[int]) -> int:
        answer = answer_of(tokens, logprobs, np.array(versions, np.int32))
        return int(check_tags(twin, sets, [answer], [(request_of(prompt), answer)], "float32")["mis_tagged"])

    assert mis_tagged([3, 3, 3, 3, 3]) == 0
    assert mis_tagged([3, 3, 3, 3, 4]) == 1
    assert mis_tagged([4, 4, 4, 4, 4]) == 5
    assert mis_tagged([3, 3, 3, 3, 1]) == 1, "its log-probability fits, but tags never go back"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_layers_widened_one_at_a_time_compute_what_a_model_in_float32_computes(family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    experts = {"qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16}, "gpt_oss": {"num_local_experts": 4}}
    config = AutoConfig.for_model(family, **sizes, **experts.get(family, {}), pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.arange(24)[None] % 64
    with torch.inference_mode():
        found, expected = widened_twin(model)(ids).logits, copy.deepcopy(model).float()(ids).logits
        narrow = model(ids).logits
    assert found.dtype == torch.float32 and torch.equal(found, expected)
    assert not torch.equal(found, narrow.float()), "the check could not tell the two apart"
    after = model.state_dict()
    assert all(
        after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in before.items()
    )


def test_divergence_is_that_of_the_whole_distributions() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=11, initializer_range=0.3, **sizes)
    one, other = (LlamaForCausalLM(config).eval() for _ in range(2))
    prompt, tokens = np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)
    row = (request_of(prompt), answer_of(tokens, np.zeros(2, np.float32), np.zeros(2, np.int64)))
    with torch.no_grad():
        p, q = (model(torch.tensor([[1, 2, 3, 4]])).logits[0, 2:].softmax(-1).double() for model in (one, other))
    expected = sum((p[i] * (p[i] / q[i]).log()).sum() for i in range(2)) / 2
    assert expected > 1e-5
    assert divergence(one, other, [row]) == pytest.approx(float(expected), rel=1e-3)
    assert divergence(one, one, [row]) == 0

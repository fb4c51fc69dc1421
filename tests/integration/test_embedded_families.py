"""Whatever the family and the schedule: tokens equal HF `generate`, log-probabilities equal a plain HF forward."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, make_model, plain, prompts, reference_greedy, reference_logprobs, request, run_out

from headrace.config.schema import EngineConfig
from headrace.engines.embedded.core import EngineCore
from headrace.models.attention import check_model

SMALL = EngineConfig(slots=4, block_size=4, prefill_chunk=10, cache_tokens=80)
"""Fewer slots than requests, chunks shorter than prompts, and a cache too small for four long sequences."""


def chosen(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return table[np.arange(len(tokens)), tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate_and_logprobs_equal_a_forward(family: str) -> None:
    model = make_model(family)
    check_model(model)
    reference = plain(model)
    core = EngineCore(model, SMALL, name="e", max_length=64, version=0)
    given = prompts([3, 23, 9, 1, 14, 11])
    shared = given[4]
    requests = [request(f"r{i}", prompt, 18, temperature=0.0) for i, prompt in enumerate(given)]
    requests += [request(f"g{i}", shared, 12, group="g", temperature=1.0, seed=i) for i in range(3)]
    core.submit(requests)
    done = run_out(core)

    assert core.counters().preemptions > 0
    assert core.counters().free_blocks == core.counters().total_blocks
    for r in requests:
        delta = done[r.id]
        assert delta.finish == "length"
        if r.sampling.temperature == 0:
            assert delta.token_ids.tolist() == reference_greedy(reference, r.token_ids, 18)
        table = reference_logprobs(reference, r.token_ids, delta.token_ids)
        np.testing.assert_allclose(delta.logprobs, chosen(table, delta.token_ids), atol=1e-4)
        assert (delta.versions == 0).all()


def test_sampled_logprobs_are_those_of_the_truncated_distribution() -> None:
    model = make_model("llama")
    reference = plain(model)
    core = EngineCore(model, EngineConfig(slots=8, block_size=4), name="e", max_length=64, version=0)
    rules = [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.6), (0.9, 12, 0.7), (1.0, 1, 1.0), (1.0, 96, 0.999)]
    prompt = prompts([7])[0]
    core.submit(
        request(f"r{i}", prompt, 25, temperature=t, top_k=k, top_p=p, seed=i) for i, (t, k, p) in enumerate(rules)
    )
    done = run_out(core)
    for i, (temperature, top_k, top_p) in enumerate(rules):
        delta = done[f"r{i}"]
        table = reference_logprobs(reference, prompt, delta.token_ids, temperature)
        for row, token, logprob in zip(table, delta.token_ids, delta.logprobs, strict=True):
            kept = truncated(np.exp(row.astype(np.float64)), top_k, top_p)
            assert token in kept
            assert logprob == pytest.approx(np.log(kept[token]), abs=1e-4)


def truncated(probabilities: np.ndarray, top_k: int, top_p: float) -> dict[int, float]:
    """The kept tokens and their renormalised probabilities, spelt out."""
    order = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
    if top_k:
        order = order[:top_k]
    total = sum(probabilities[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p * total:
            break
        kept.append(i)
        mass += probabilities[i]
    return {i: probabilities[i] / mass for i in kept}


def test_the_schedule_does_not_change_sampled_tokens() -> None:
    model = make_model("qwen3")
    given = prompts([5, 30, 12, 12, 8, 21])
    requests = [request(f"r{i}", p, 16, group="x" * (i in (2, 3)), seed=i) for i, p in enumerate(given)]
    requests[3].token_ids = requests[2].token_ids
    wide = EngineCore(model, EngineConfig(slots=8), name="wide", max_length=64, version=0)
    small = EngineCore(model, SMALL, name="small", max_length=64, version=0)
    results = []
    for core in (wide, small):
        core.submit(requests)
        results.append({k: v.token_ids.tolist() for k, v in run_out(core).items()})
    assert wide.counters().preemptions == 0 < small.counters().preemptions
    assert results[0] == results[1]


def test_a_group_computes_its_prompt_once() -> None:
    model = make_model("llama")
    prompt = prompts([33])[0]
    core = EngineCore(model, EngineConfig(slots=8, block_size=8), name="e", max_length=64, version=0)
    core.submit(request(f"r{i}", prompt, 1 if i == 0 else 9, group="g", seed=i) for i in range(8))
    done = run_out(core)
    # One whole prompt; the others begin with its last token, a decode, though the first ends with its first token.
    assert core.counters().prefilled_tokens == 33
    reference = plain(model)
    for delta in done.values():
        table = reference_logprobs(reference, prompt, delta.token_ids)
        np.testing.assert_allclose(delta.logprobs, chosen(table, delta.token_ids), atol=1e-4)


def test_numbers_that_are_not_finite_stay_with_their_sequence() -> None:
    model = make_model("llama", tie_word_embeddings=False)
    reference = plain(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = float("nan")
    given = [prompt[prompt != 13] for prompt in prompts([4, 9, 30, 12])]
    broken = np.array([5, 13, 6], np.int32)
    core = EngineCore(model, EngineConfig(slots=6, block_size=8, cache_tokens=96), name="e", max_length=64, version=0)
    # The broken one first, so that it has block 0; then again, so that others get its blocks.
    for turn in range(3):
        requests = [request(f"broken{turn}", broken, 5)]
        requests += [request(f"{turn}-{i}", prompt, 5, temperature=0.0) for i, prompt in enumerate(given)]
        core.submit(requests)
        done = run_out(core)
        assert done[f"broken{turn}"].finish == "failed"
        assert "not finite at position 3 under version 0" in done[f"broken{turn}"].error
        for i, prompt in enumerate(given):
            tokens = done[f"{turn}-{i}"].token_ids.tolist()
            assert tokens == reference_greedy(reference, prompt, 5)[: len(tokens)] and (
                len(tokens) == 5 or 13 in tokens
            )


def test_padding_does_not_read_the_block_of_a_broken_sequence() -> None:
    model = make_model("llama", tie_word_embeddings=False)
    reference = plain(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[13] = float("nan")
    core = EngineCore(model, EngineConfig(slots=4, block_size=4), name="e", max_length=64, version=0)
    short, long = (prompt[prompt != 13] for prompt in prompts([3, 18]))
    # Block 0 is freed after one step and goes to the broken one-token prompt, which then decodes beside the others.
    core.submit([request("first", short[:1], 1), request("s", short, 4, temperature=0.0), request("l", long, 4)])
    begun = core.step()
    core.submit([request("broken", np.array([13], np.int32), 4)])
    done = run_out(core, begun=begun)
    assert done["broken"].finish == "failed"
    assert (done["s"].finish, done["s"].token_ids.tolist()) == ("length", reference_greedy(reference, short, 4))


def test_stop_tokens_and_limits_end_a_sequence() -> None:
    model = make_model("llama")
    prompt = prompts([6])[0]
    expected = reference_greedy(plain(model), prompt, 12)
    stop = next(t for i, t in enumerate(expected) if i >= 3 and t not in expected[:i])
    core = EngineCore(model, EngineConfig(slots=4), name="e", max_length=12, version=0)
    core.submit(
        [
            request("stop", prompt, 12, temperature=0.0, stop_token_ids=(stop,)),
            request("max", prompt, 2, temperature=0.0),
            request("longest", prompt, 50, temperature=0.0),
        ]
    )
    done = run_out(core)
    assert done["stop"].finish == ("stop" if expected.index(stop) < 6 else "length")
    assert done["stop"].token_ids.tolist() == expected[: expected.index(stop) + 1][:6]
    assert (done["max"].finish, done["max"].token_ids.tolist()) == ("length", expected[:2])
    assert (done["longest"].finish, done["longest"].token_ids.tolist()) == ("length", expected[:6])


def test_a_request_that_cannot_be_served_fails_alone() -> None:
    model = make_model("llama")
    core = EngineCore(model, EngineConfig(slots=4, block_size=4, cache_tokens=16), name="e", max_length=64, version=0)
    good, long, grows = prompts([5, 20, 10])
    core.submit(
        [
            request("good", good, 4, temperature=0.0),
            request("never", long, 4),
            request("outgrows", grows, 30, temperature=0.0),
            request("empty", good[:0], 4),
            request("unknown token", np.array([1, 97], np.int32), 4),
            request("too long", prompts([64])[0], 1),
            request("no tokens", good, 0),
        ]
    )
    done = run_out(core)
    reference = plain(model)
    assert done["good"].token_ids.tolist() == reference_greedy(reference, good, 4)
    assert done["never"].finish == "failed"
    assert "20 tokens do not fit into the KV cache of 16" in done["never"].error
    # What was sampled before the cache ran out is still a partial answer.
    assert done["outgrows"].finish == "failed"
    assert done["outgrows"].token_ids.tolist() == reference_greedy(reference, grows, 7)
    for name in ("empty", "unknown token", "too long", "no tokens"):
        assert done[name].finish == "failed"
        assert done[name].error and "\n" not in done[name].error
    assert core.counters().free_blocks == core.counters().total_blocks

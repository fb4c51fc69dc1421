"""Forcing a model's own choice changes no bit; forcing another equals routing written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_moe_families import FAMILIES, make_moe, packed
from tiny_models import prompts
from torch.utils.checkpoint import checkpoint

from headrace.errors import ModelError
from headrace.models.experts import RoutingRecorder, RoutingShape, prepare_experts, recording
from headrace.training.routing import forcing
from headrace.types import NO_EXPERT

FORCED = [family for family in FAMILIES if family != "phimoe"]
GIVEN = [torch.from_numpy(ids).long() for ids in prompts([6, 11])]
TOKENS = 17


def prepared(family: str, **changes: Any) -> tuple[Any, RoutingShape]:
    model = make_moe(family, **changes)
    shape = prepare_experts(model)
    assert shape is not None
    return model, shape


def logits_and_gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    logits = packed(model, GIVEN)
    torch.log_softmax(logits, -1)[torch.arange(TOKENS), torch.cat(GIVEN)].sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


def recorded(model: Any, shape: RoutingShape) -> torch.Tensor:
    recorder = RoutingRecorder(shape, tokens=TOKENS, device="cpu")
    with torch.no_grad(), recording(recorder):
        packed(model, GIVEN)
    return recorder.chosen


def another_choice(shape: RoutingShape, limit: int, seed: int = 0) -> np.ndarray:
    """Random distinct experts, of the first `limit` ones (a router with groups can only choose among some)."""
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(limit)[: shape.per_token] for _ in range(TOKENS * len(shape.layers))]
    return np.array(rows, np.int16).reshape(TOKENS, len(shape.layers), shape.per_token)


@pytest.mark.parametrize("family", FORCED)
def test_a_models_own_choice_gives_the_same_bits(family: str) -> None:
    model, shape = prepared(family)
    logits, gradients = logits_and_gradients(model)
    with forcing(model, shape, recorded(model, shape)):
        forced_logits, forced_gradients = logits_and_gradients(model)
    assert torch.equal(forced_logits, logits)
    assert len(gradients) == len(forced_gradients) > 0
    assert all(torch.equal(a, b) for a, b in zip(gradients, forced_gradients, strict=True))


@pytest.mark.parametrize("family", FORCED)
def test_forced_experts_run_and_free_tokens_choose(family: str) -> None:
    model, shape = prepared(family)
    own = recorded(model, shape)
    # Groups of two of eight experts: any three of the first four lie in two groups, as many as may be chosen.
    routing = another_choice(shape, limit=4)
    routing[:6] = NO_EXPERT
    with forcing(model, shape, routing):
        ran = recorded(model, shape)
    assert ran[6:].tolist() == routing[6:].tolist()
    assert ran[:6].tolist() == own[:6].tolist()  # the first sequence sees nothing of the second
    assert recorded(model, shape).tolist() == own.tolist()  # and nothing stays behind


def by_hand(family: str, block: Any, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The weights that each family's publication gives to these experts."""
    logits = hidden @ (block.gate if hasattr(block, "gate") else block.router).weight.T
    if family == "mixtral":
        chosen = logits.softmax(-1).gather(1, index)
        return chosen / chosen.sum(-1, keepdim=True)
    if family == "granitemoe":
        return logits.gather(1, index).softmax(-1)
    if family == "deepseek_v2":
        return logits.softmax(-1).gather(1, index) * block.gate.routed_scaling_factor
    chosen = logits.sigmoid().gather(1, index)
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * block.gate.routed_scaling_factor


@pytest.mark.parametrize("family", ["mixtral", "granitemoe", "deepseek_v2", "deepseek_v3"])
def test_another_choice_weighs_as_written_out_by_hand(family: str) -> None:
    model, shape = prepared(family)
    routing = another_choice(shape, limit=4)
    seen: list[tuple[Any, tuple[torch.Tensor, ...]]] = []
    blocks = {m.experts: m for m in model.modules() if hasattr(m, "experts")}
    hooks = [e.register_forward_pre_hook(lambda e, call: seen.append((blocks[e], call))) for e in blocks]
    with torch.no_grad(), forcing(model, shape, routing):
        packed(model, GIVEN)
        assert len(seen) == len(shape.layers)
        for column, (block, (hidden, index, weights)) in enumerate(seen):
            assert index.tolist() == routing[:, column].tolist()
            torch.testing.assert_close(weights, by_hand(family, block, hidden, index), atol=1e-6, rtol=1e-5)
            assert (weights > 0).all()
    for hook in hooks:
        hook.remove()


def test_layers_computed_again_in_the_backward_pass_are_forced_too() -> None:
    model, shape = prepared("qwen3_moe")
    _, own = logits_and_gradients(model)
    routing = another_choice(shape, limit=8)
    with forcing(model, shape, routing):
        _, expected = logits_and_gradients(model)
        logits = checkpoint(packed, model, GIVEN, use_reentrant=False)
        model.zero_grad()
        torch.log_softmax(logits, -1)[torch.arange(TOKENS), torch.cat(GIVEN)].sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(own, found, strict=True))


def test_what_cannot_be_forced_is_refused() -> None:
    model, shape = prepared("phimoe")
    with (
        forcing(model, shape, recorded(model, shape)),
        pytest.raises(ModelError, match="by 0 topk calls, not one") as caught,
    ):
        packed(model, GIVEN)
    assert "\n" not in str(caught.value)
    packed(model, GIVEN)

    model, shape = prepared("mixtral")
    good = recorded(model, shape)
    with pytest.raises(ValueError, match="is not \\[tokens, 3, 3\\]"), forcing(model, shape, good[:, 1:]):
        pass
    for bad in (8, -2, NO_EXPERT):
        broken = good.clone()
        broken[3, 1, 2] = bad
        with pytest.raises(ValueError, match="not those of 8 experts"), forcing(model, shape, broken):
            pass
    with forcing(model, shape, good[1:]), pytest.raises(ValueError, match="17 tokens is forced by a record of 16"):
        packed(model, GIVEN)
    unrecorded = RoutingShape(layers=(), per_token=1, experts=4, recorded=False)
    with pytest.raises(ModelError, match="cannot be forced"), forcing(model, unrecorded, good):
        pass

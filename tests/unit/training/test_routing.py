"""Passes that take recorded experts, packed and in any rows, against routing written out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import torch
from random_models import CHOSEN, LAYERS, AllDouble, random_batch, twins, with_experts
from reference_loop import batch_loss
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from headrace.algorithms.losses.base import build_loss
from headrace.config.schema import AlgorithmConfig
from headrace.errors import UserError
from headrace.models.experts import RoutingRecorder, prepare_experts, recording
from headrace.training.layers import recompute_layers
from headrace.training.policies import FrozenPolicy
from headrace.training.routing import following
from headrace.training.rows import plan
from headrace.training.trainer import REROUTED, accumulate
from headrace.types import NO_EXPERT, Batch

CISPO = AlgorithmConfig()


@pytest.fixture
def all_double():
    with AllDouble():
        yield


class HandRouter(torch.nn.Module):
    """Mixtral's formula for given experts, or for the likeliest where none are given."""

    def __init__(self, router: MixtralTopKRouter, layer: int) -> None:
        super().__init__()
        self.weight = router.weight
        self.layer = layer
        self.given: Any = None
        self.changed = 0

    def forward(self, hidden: torch.Tensor) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        index = logits.argsort(-1, descending=True)[:, :CHOSEN]
        for place, experts in enumerate(self.given[:, self.layer].tolist()):
            if experts[0] != NO_EXPERT:
                self.changed += set(experts) != set(index[place].tolist())
                index[place] = torch.tensor(experts)
        chosen = logits.double().softmax(-1).gather(1, index)
        return logits, chosen / chosen.sum(-1, keepdim=True), index


class ByHand(torch.nn.Module):
    """A plain model one sequence at a time, told for each what was recorded with the tokens after its own."""

    def __init__(self, plain: Any, batch: Batch) -> None:
        super().__init__()
        self.plain = plain
        for number, layer in enumerate(plain.model.layers):
            layer.mlp.gate = HandRouter(layer.mlp.gate, number)
        ends = np.cumsum(batch.lengths)
        self._records = {
            tuple(batch.token_ids[start:end].tolist()): batch.routing[start + 1 : end]
            for start, end in zip(ends - batch.lengths, ends, strict=True)
        }

    def forward(self, input_ids: torch.Tensor, **rest: Any) -> Any:
        record = self._records[tuple(input_ids[0].tolist())]
        free = np.full((1, LAYERS, CHOSEN), NO_EXPERT, np.int16)
        for layer in self.plain.model.layers:
            layer.mlp.gate.given = np.concatenate([record, free])
        return self.plain(input_ids=input_ids, **rest)

    @property
    def changed(self) -> int:
        return sum(layer.mlp.gate.changed for layer in self.plain.model.layers)


def gradients_of(model: Any, batch: Batch, *, micro_batch_tokens: int = 10_000, share: bool = True) -> Any:
    model.zero_grad()
    found = accumulate(model, batch, build_loss(CISPO), micro_batch_tokens=micro_batch_tokens, share_prefixes=share)
    return found, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    norm = float(torch.sqrt(sum(g.square().sum() for g in expected.values())))
    assert max(float((found[n] - expected[n]).abs().max()) for n in expected) < 1e-10 * norm


@pytest.mark.parametrize("first_alike", [True, False], ids=["one-pass", "own-passes"])
@pytest.mark.parametrize(("budget", "share"), [(10_000, True), (10_000, False), (40, True), (1, False)])
def test_packed_passes_take_the_experts_of_the_record(all_double, first_alike, budget, share):
    packed, plain = twins("mixtral", torch.float64)
    batch = with_experts(random_batch(1, temperature=0.8), first_alike=first_alike)
    found, gradients = gradients_of(packed, batch, micro_batch_tokens=budget, share=share)
    hand = ByHand(plain, batch)
    loss = batch_loss(hand, batch, CISPO, None)
    loss.backward()
    assert abs(found.loss - float(loss.detach())) < 1e-10
    assert_near(gradients, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
    # Not what the routers would have chosen.
    free, _ = gradients_of(packed, msgspec.structs.replace(batch, routing=None))
    assert abs(free.loss - found.loss) > 1e-4
    assert REROUTED not in free.metrics
    assert found.metrics[REROUTED] == pytest.approx(hand.changed / LAYERS / batch.trained_tokens)


def test_what_the_routers_choose_anyway_changes_nothing(all_double):
    packed, _ = twins("mixtral", torch.float64)
    shape = prepare_experts(packed)
    batch = random_batch(4)
    [row] = plan(batch, micro_batch_tokens=10_000, share_prefixes=False)
    recorder = RoutingRecorder(shape, tokens=len(row), device="cpu")
    free, expected = gradients_of(packed, batch, share=False)
    with recording(recorder):
        FrozenPolicy(packed).logprobs([row], batch)
    routing = np.full((len(batch.token_ids), LAYERS, CHOSEN), NO_EXPERT, np.int16)
    routing[row.sources] = recorder.chosen.numpy()[row.predictors]
    found, gradients = gradients_of(packed, msgspec.structs.replace(batch, routing=routing), share=False)
    assert found.loss == free.loss
    assert found.metrics[REROUTED] == 0
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_layers_computed_again_take_the_same_experts():
    packed, _ = twins("mixtral")
    batch = with_experts(random_batch(1))
    found, expected = gradients_of(packed, batch, micro_batch_tokens=40)
    recompute_layers(packed.model.layers)
    again, gradients = gradients_of(packed, batch, micro_batch_tokens=40)
    assert again.metrics == found.metrics
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_other_policies_follow_the_record_and_a_teacher_does_not(all_double):
    packed, _ = twins("mixtral", torch.float64)
    batch = with_experts(random_batch(1))
    rows = plan(batch, micro_batch_tokens=40, share_prefixes=True)
    free = [dataclasses.replace(row, routing=None) for row in rows]
    followed, ignored, expected = (
        torch.cat(FrozenPolicy(packed, follows=follows).logprobs(given, batch))
        for follows, given in ((True, rows), (False, rows), (True, free))
    )
    assert torch.equal(ignored, expected)
    assert float((followed - ignored).abs().max()) > 1e-3


@pytest.mark.parametrize(
    "how",
    [
        {"target_parameters": ["mlp.experts.down_proj"]},
        {"modules_to_save": ["experts"]},
        {"modules_to_save": ["mlp"]},
    ],
    ids=["adapted", "in full", "with their router"],
)
def test_experts_with_an_adapter_are_forced_too(all_double, how):
    packed, _ = twins("mixtral", torch.float64)
    batch = with_experts(random_batch(1))
    whole, _ = gradients_of(packed, batch)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], **how)
    adapted = peft.get_peft_model(packed, config).base_model.model.double().eval()
    found, gradients = gradients_of(adapted, batch)
    assert abs(found.loss - whole.loss) < 1e-10  # a fresh adapter changes nothing
    assert found.metrics[REROUTED] == pytest.approx(whole.metrics[REROUTED])
    assert any("experts" in name and float(g.abs().max()) > 0 for name, g in gradients.items())


def test_a_model_that_cannot_follow_is_one_line():
    dense, _ = twins("llama")
    batch = with_experts(random_batch(1))
    [row] = plan(batch, micro_batch_tokens=10_000, share_prefixes=True)
    expected = r"this model has none \(\[rollouts\] keep_routing = false trains"
    with pytest.raises(UserError, match=expected) as caught, following(dense, row):
        pass
    assert "\n" not in str(caught.value)

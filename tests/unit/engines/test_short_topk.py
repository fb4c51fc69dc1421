"""The kernel in the place of a router's `topk`, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engines.embedded.device.routing import replace_topk
from headrace.engines.embedded.kernels.topk import LONGEST_ROW, short_topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=15)
@given(st.integers(1, 20), st.integers(1, 130), st.integers(0, 99), st.data())
def test_the_largest_of_each_row_in_order(rows: int, size: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, min(size, 8)))
    values = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    found, places = short_topk(values, count)
    expected = torch.topk(values, count)
    assert torch.equal(found, expected.values) and torch.equal(places, expected.indices)


def test_ties_infinities_and_numbers_that_are_none_give_places_inside_the_row() -> None:
    none, low, high = float("nan"), float("-inf"), float("inf")
    values = torch.tensor([[low] * 5, [1.0, none, 3.0, 3.0, high], [2.0] * 5], device=DEVICE)
    found, places = short_topk(values, 4)
    assert places.tolist() == [[0, 1, 2, 3], [1, 4, 2, 3], [0, 1, 2, 3]]
    torch.testing.assert_close(found, torch.topk(values, 4).values, equal_nan=True, rtol=0, atol=0)


def changed(function: Any, *given: torch.Tensor) -> tuple[list[int], Any]:
    """How many `topk` were replaced in each graph of this function, and what it then returns."""
    replaced: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        # Compilers look at it later, so it must be sound.
        replaced.append(replace_topk(graph))
        graph.graph.lint()
        return graph.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        found = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)(*given)
    return replaced, found


class Router(torch.nn.Module):
    """Chooses among its inputs. The size of a row is that of a parameter, so it is no variable to a compiler."""

    def __init__(self, choose: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(10, device=DEVICE))
        self.choose = choose

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.choose(torch.nn.functional.linear(hidden, self.weight))


@pytest.mark.parametrize(
    ("replaced", "choose"),
    [
        (1, lambda x: torch.topk(x, 3, dim=-1)),
        (1, lambda x: x.topk(2, -1).indices),
        (1, lambda x: torch.topk(x, k=2, dim=1, sorted=False)[1]),
        (0, lambda x: torch.topk(x, 2, dim=0)),
        (0, lambda x: torch.topk(x, 2, largest=False)),
        (0, lambda x: torch.topk(x.double(), 2)),
        (0, lambda x: torch.topk(x.repeat(1, LONGEST_ROW), 2).values),
    ],
)
def test_only_what_the_kernel_can_do_is_replaced(replaced: int, choose: Any) -> None:
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    graphs, found = changed(Router(choose), values)
    expected = choose(values)
    parts = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    assert graphs == [replaced] and all(torch.equal(one, other) for one, other in parts)


@pytest.mark.parametrize(("family", "experts"), [("qwen3_moe", "num_experts"), ("gpt_oss", "num_local_experts")])
def test_a_models_router_is_found(family: str, experts: str) -> None:
    sizes = {"hidden_size": 16, "vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    sizes |= {"num_key_value_heads": 1, "num_experts_per_tok": 2, "intermediate_size": 16, experts: 6}
    config = AutoConfig.for_model(family, **sizes, pad_token_id=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE)
    router = model.model.layers[0].mlp.gate if family == "qwen3_moe" else model.model.layers[0].mlp.router
    with torch.no_grad():
        router.weight.normal_()
    hidden = torch.randn(7, 16, device=DEVICE)
    graphs, found = changed(router, hidden)
    assert graphs == [1]
    for one, other in zip(found, router(hidden), strict=True):
        torch.testing.assert_close(one, other)

"""The kernels of experts, interpreted, against the loops of the models themselves and sorts written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from expert_cases import FAMILIES, Case, by_kernels, error_of
from headrace.engines.embedded.device.experts import activate, choose_products, find_swish, products_of
from headrace.engines.embedded.kernels.experts import UNLIMITED, Blocks, Swish, choose_blocks, most_tiles, sort_pairs
from headrace.models.attention import COLUMN, prepare_to_compile
from headrace.models.experts import EXPERTS, PRODUCTS, RoutingRecorder, RoutingShape, recording, weights_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@settings(max_examples=15)
@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from([16, 32]), st.data())
def test_pairs_are_sorted_by_expert_and_tiled(tokens: int, experts: int, size: int, data: st.DataObject) -> None:
    per_token = data.draw(st.integers(1, min(3, experts)))
    draw = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    index = torch.rand(tokens, experts, generator=draw).topk(per_token).indices.to(DEVICE)
    order, starts, tiles = (found.cpu() for found in sort_pairs(index, experts, size))
    flat = index.cpu().reshape(-1)
    assert order.tolist() == sorted(range(len(flat)), key=lambda pair: (flat[pair].item(), pair))
    assert starts.tolist() == [int((flat < expert).sum()) for expert in range(experts + 1)]
    listed = [[e, first] for e in range(experts) for first in range(int(starts[e]), int(starts[e + 1]), size)]
    assert len(tiles) == most_tiles(len(flat), experts, size) >= len(listed)
    assert tiles[: len(listed)].tolist() == listed and (tiles[len(listed) :, 0] == -1).all()


def test_more_pairs_than_one_look_of_the_sort_holds() -> None:
    index = (torch.arange(1500)[:, None] * torch.tensor([7, 11]) + torch.tensor([0, 1])) % 5
    order, starts, _ = sort_pairs(index.to(DEVICE), 5, 16)
    assert order.tolist() == torch.sort(index.reshape(-1), stable=True).indices.tolist()
    assert starts[-1] == 3000


CASES = {
    "one token": {"tokens": 1},
    "several tiles of one expert": {"tokens": 40, "used": 2},
    "empty experts": {"experts": 9, "used": 3},
    "one expert gets everything": {"tokens": 20, "per_token": 1, "used": 1},
    "sizes that fill no block": {"width": 40, "inner": 23},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_float32_equals_the_familys_own_loop(family: str, changes: dict[str, int]) -> None:
    case = Case(family, **changes)
    module, call = case.module(DEVICE), case.call(DEVICE)
    assert error_of(by_kernels(module, *call), module(*call)) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_other_sizes_compute_the_same(family: str) -> None:
    case = Case(family, tokens=20, inner=20)
    module, call = case.module(DEVICE), case.call(DEVICE)
    blocks = Blocks(tokens=32, up_rows=16, down_rows=32, depth=16)
    assert error_of(by_kernels(module, *call, blocks=blocks), module(*call)) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bfloat16_is_nearly_as_close_to_float32_as_the_familys_own_loop(family: str) -> None:
    """Triton's interpreter cuts numbers off where a GPU rounds them: twice the error."""
    case = Case(family, tokens=24, width=64, inner=48)
    exact, narrow = case.module(DEVICE), case.module(DEVICE).bfloat16()
    for wide, parameter in zip(exact.parameters(), narrow.parameters(), strict=True):
        wide.copy_(parameter)
    hidden, index, weights = case.call(DEVICE)
    hidden, weights = hidden.bfloat16(), weights.bfloat16()
    found, own = by_kernels(narrow, hidden, index, weights), narrow(hidden, index, weights)
    expected = exact(hidden.float(), index, weights.float())
    assert found.dtype == torch.bfloat16
    assert error_of(found, expected) < 2 * error_of(own, expected) < 2e-2


def test_experts_that_nobody_chose_are_not_read() -> None:
    case = Case(experts=5, used=3)
    module, call = case.module(DEVICE), case.call(DEVICE)
    expected = by_kernels(module, *call)
    for parameter in module.parameters():
        parameter[3:] = float("nan")
    assert torch.equal(by_kernels(module, *call), expected)


def test_blocks_follow_from_the_pairs_of_an_expert() -> None:
    """Batches of 128 and 256 of 128 experts and of 64, 8 for each token; and of one token."""
    assert [choose_blocks(8 * batch, 128, 2).tokens for batch in (1, 128, 256)] == [16, 16, 32]
    assert [choose_blocks(8 * batch, 64, 2).tokens for batch in (256, 1024)] == [64, 64]
    for pairs in (1, 100, 2048, 8192):
        blocks = choose_blocks(pairs, 64, 2)
        bytes_at_once = blocks.stages * 2 * blocks.depth * (max(blocks.up_rows, blocks.down_rows) + blocks.tokens)
        assert bytes_at_once <= 113_000, "two programs do not fit on a processor of an H200"


@pytest.mark.parametrize(
    ("family", "swish"),
    [
        ("qwen3_moe", Swish()),
        ("mixtral", Swish()),
        ("qwen2_moe", Swish()),
        ("gpt_oss", Swish(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)),
    ],
)
def test_the_activation_of_a_family_is_found_by_a_trial(family: str, swish: Swish) -> None:
    module = Case(family).module("cpu")
    assert find_swish(module) == swish and choose_products(module) is products_of(swish)
    inner = torch.randn(5, 2 * 24) * 5
    torch.testing.assert_close(activate(swish, inner), module._apply_gate(inner))
    assert torch.finfo(torch.bfloat16).max > UNLIMITED


def test_other_activations_are_left_to_torch_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 32, "n_routed_experts": 4, "moe_intermediate_size": 16, "moe_latent_size": None}
    ungated = NemotronHExperts(AutoConfig.for_model("nemotron_h", **sizes))
    gelu = Case().module("cpu")
    gelu.act_fn = torch.nn.GELU()
    assert choose_products(ungated) is choose_products(ungated) is choose_products(gelu) is None
    assert [record.getMessage().split(" are ")[0] for record in caplog.records] == [
        "the experts of NemotronHExperts",
        "the experts of Qwen3MoeExperts",
    ]


class Layer(torch.nn.Module):
    """A layer with experts, as a compiler sees one."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *call: torch.Tensor) -> torch.Tensor:
        return self.experts(*call) * 2


def test_compiled_layers_share_a_compilation_and_record_their_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engines.embedded.device.experts.FEW_TOKENS", 16)
    compilations: list[Any] = []

    def compiler(graph: Any, examples: Any) -> Any:
        compilations.append(graph)
        return graph

    torch._dynamo.reset()
    layers = [Layer(Case(seed=seed).module(DEVICE)) for seed in (0, 5)]
    own = [by for layer in layers for by in [Case().call(DEVICE)]]
    expected = [2 * layer.experts(*call) for layer, call in zip(layers, own, strict=True)]
    many = Case(tokens=33).call(DEVICE)
    expected_of_many = 2 * layers[0].experts(*many)
    for column, layer in enumerate(layers):
        layer.experts.config._experts_implementation = EXPERTS
        setattr(layer.experts, COLUMN, column)
        setattr(layer.experts, PRODUCTS, choose_products(layer.experts))
        prepare_to_compile(layer)
    recorder = RoutingRecorder(RoutingShape(layers=(0, 1), per_token=2, experts=6), tokens=40, device=DEVICE)
    compiled = [torch.compile(layer, dynamic=True, fullgraph=True, backend=compiler) for layer in layers]
    with torch.inference_mode(), recording(recorder):
        for layer, call, wanted in zip(compiled, own, expected, strict=True):
            assert error_of(layer(*call), wanted) < 1e-5
        assert recorder.chosen[:9, 0].tolist() == recorder.chosen[:9, 1].tolist() == own[0][1].tolist()
        assert error_of(compiled[0](*many), expected_of_many) < 1e-5, "more tokens than the kernels take"
        assert recorder.chosen[:33, 0].tolist() == many[1].tolist()
    assert len(compilations) == 1
    assert weights_of(layers[0].experts).up.data_ptr() == layers[0].experts.gate_up_proj.data_ptr()

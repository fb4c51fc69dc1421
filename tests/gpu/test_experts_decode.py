"""The kernels of experts on the GPU: every family against its own loop in float32, captured steps, whole engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from tiny_models import make_model, plain, prompts, reference_greedy, reference_logprobs, request, run_out

from expert_cases import FAMILIES, Case, by_kernels, error_of
from headrace.config.schema import EngineConfig
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.device.experts import find_swish
from headrace.engines.embedded.kernels.experts import Blocks, choose_blocks, expert_products, sort_pairs
from headrace.models.experts import PRODUCTS, experts_modules, weights_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = {
    "qwen3-moe-small": Case(tokens=256, per_token=8, experts=64, used=64, width=1024, inner=512),
    "qwen3-30b-a3b": Case(tokens=256, per_token=8, experts=128, used=128, width=2048, inner=768),
    "gpt-oss-20b": Case("gpt_oss", tokens=64, per_token=4, experts=32, used=32, width=2880, inner=2880),
}
SPREADS = {
    "spread": {},
    "one token": {"tokens": 1, "per_token": 2},
    "empty experts": {"used": 9},
    "all on one expert": {"used": 1, "per_token": 1},
    "odd sizes": {"width": 200, "inner": 72},
}


@pytest.fixture(autouse=True)
def exact_references() -> Any:
    """References in float32 must not be computed with fewer bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def narrow_case(case: Case) -> tuple[Any, Any, tuple[torch.Tensor, ...]]:
    """The experts in float32 and in bfloat16, with equal weights, and a call in bfloat16."""
    exact, narrow = case.module("cuda"), case.module("cuda").bfloat16()
    for wide, parameter in zip(exact.parameters(), narrow.parameters(), strict=True):
        wide.copy_(parameter)
    hidden, index, weights = case.call("cuda")
    return exact, narrow, (hidden.bfloat16(), index, weights.bfloat16())


@pytest.mark.parametrize("changes", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32_equals_the_familys_own_loop(family: str, changes: dict[str, int]) -> None:
    case = Case(family, **{"tokens": 70, "experts": 16, "used": 16, "width": 256, "inner": 96, **changes})
    module, call = case.module("cuda"), case.call("cuda")
    assert error_of(by_kernels(module, *call), module(*call)) < 1e-5


@pytest.mark.parametrize("changes", SPREADS.values(), ids=SPREADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_the_familys_own_loop(family: str, changes: dict[str, int]) -> None:
    case = Case(family, **{"tokens": 70, "experts": 16, "used": 16, "width": 256, "inner": 128, **changes})
    exact, narrow, call = narrow_case(case)
    expected = exact(call[0].float(), call[1], call[2].float())
    assert error_of(by_kernels(narrow, *call), expected) < min(1e-2, 1.2 * error_of(narrow(*call), expected))


@pytest.mark.parametrize("name", SHAPES)
def test_whole_shapes_and_every_size_of_blocks(name: str) -> None:
    case = SHAPES[name]
    exact, narrow, call = narrow_case(case)
    expected = exact(call[0].float(), call[1], call[2].float())
    bound = 1.2 * error_of(narrow(*call), expected)
    chosen = choose_blocks(case.tokens * case.per_token, case.experts, 2)
    for blocks in (chosen, Blocks(16, 64, 64, 128), Blocks(32, 128, 64, 64), Blocks(128, 128, 128, 64, warps=8)):
        assert error_of(by_kernels(narrow, *call, blocks=blocks), expected) < bound, blocks


def test_the_sort_is_that_of_torch() -> None:
    for tokens, experts, per_token in ((1, 4, 2), (256, 128, 8), (1024, 64, 8), (3, 300, 7)):
        index = torch.rand(tokens, experts, device="cuda").topk(per_token).indices
        order, starts, tiles = sort_pairs(index, experts, 16)
        expected = torch.sort(index.reshape(-1), stable=True)
        assert torch.equal(order.long(), expected.indices)
        counts = torch.bincount(index.reshape(-1), minlength=experts)
        assert starts.tolist() == [0, *counts.cumsum(0).tolist()]
        assert int((tiles[:, 0] >= 0).sum()) == int((-(-counts // 16)).sum())


def test_a_captured_call_follows_what_changes_in_its_buffers() -> None:
    """Another spread over experts, other tokens and other weights, at the same addresses, without another capture."""
    first, second = Case(tokens=48, experts=16, used=16), Case(tokens=48, experts=16, used=3, seed=7)
    module, call = first.module("cuda"), first.call("cuda")
    swish = find_swish(module)
    assert swish is not None
    expert_products(weights_of(module), swish, *call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = expert_products(weights_of(module), swish, *call)
    for case in (first, second, first):
        for buffer, new in zip(call, case.call("cuda"), strict=True):
            buffer.copy_(new)
        for buffer, new in zip(module.parameters(), case.module("cuda").parameters(), strict=True):
            buffer.copy_(new)
        found.fill_(float("nan"))
        graph.replay()
        assert error_of(found, module(*call)) < 1e-5


def test_equal_inputs_give_equal_bits() -> None:
    _, narrow, call = narrow_case(SHAPES["qwen3-moe-small"])
    first = by_kernels(narrow, *call)
    assert all(torch.equal(by_kernels(narrow, *call), first) for _ in range(5))


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_an_engine_gives_the_tokens_of_generate(family: str, *, kernels: bool) -> None:
    """Captured and compiled, with and without the kernels: greedy tokens, log-probabilities and the same names."""
    model = make_model(family).cuda()
    reference, names = plain(model), {name: p.data_ptr() for name, p in model.named_parameters()}
    config = EngineConfig(slots=4, block_size=4, prefill_chunk=10, expert_kernels=kernels)
    core = EngineCore(model, config, name="gpu", max_length=64, version=0)
    used = [getattr(module, PRODUCTS) is not None for module in experts_modules(model).values()]
    assert used == [kernels] * len(used)
    requests = [request(f"r{i}", prompt, 18, temperature=0.0) for i, prompt in enumerate(prompts([3, 23, 9, 1]))]
    core.submit(requests)
    done = run_out(core)
    for r in requests:
        delta = done[r.id]
        assert delta.token_ids.tolist() == reference_greedy(reference, r.token_ids, 18)
        table = reference_logprobs(reference, r.token_ids, delta.token_ids)
        expected = table[np.arange(len(delta.token_ids)), delta.token_ids]
        np.testing.assert_allclose(delta.logprobs, expected, atol=1e-4)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == names

"""The experts function computes what the model's own loop does, and records what it computed with."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headrace.errors import ModelError
from headrace.models.attention import prepare_to_compile
from headrace.models.experts import EXPERTS, RoutingRecorder, RoutingShape, prepare_experts, recording

KINDS = {
    "gated": (Qwen3MoeExperts, "qwen3_moe", "num_experts", "moe_intermediate_size"),
    "transposed with bias": (GptOssExperts, "gpt_oss", "num_local_experts", "intermediate_size"),
    "ungated": (NemotronHExperts, "nemotron_h", "n_routed_experts", "moe_intermediate_size"),
}


def make_experts(kind: str = "gated", hidden: int = 32, inner: int = 24, experts: int = 5, seed: int = 0) -> Any:
    cls, family, count, width = KINDS[kind]
    changes = {"hidden_size": hidden, count: experts, width: inner}
    if family == "nemotron_h":
        changes |= {"moe_latent_size": None}
    config = AutoConfig.for_model(family, **changes)
    config._experts_implementation = EXPERTS
    module = cls(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module


def make_calls(tokens: int, experts: int, per_token: int, hidden: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    weights, index = torch.topk(torch.rand(tokens, experts, generator=generator), per_token)
    return torch.randn(tokens, hidden, generator=generator), index, weights


def by_its_own_loop(module: Any, *call: torch.Tensor) -> torch.Tensor:
    module.config._experts_implementation = "eager"
    try:
        return module(*call)
    finally:
        module.config._experts_implementation = EXPERTS


def one_pair_at_a_time(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gated experts spelt out, in float64."""
    total = torch.zeros(hidden.shape, dtype=torch.float64)
    for t in range(hidden.shape[0]):
        for expert, weight in zip(index[t].tolist(), weights[t].double(), strict=True):
            gate, up = (module.gate_up_proj[expert].double() @ hidden[t].double()).chunk(2)
            total[t] += weight * (module.down_proj[expert].double() @ (torch.nn.functional.silu(gate) * up))
    return total


@pytest.mark.parametrize("inner", [24, 23], ids=["grouped", "not aligned"])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_equals_the_models_own_loop(kind: str, inner: int) -> None:
    module = make_experts(kind, inner=inner, experts=11)
    call = make_calls(tokens=17, experts=11, per_token=3, hidden=32)
    with torch.no_grad():
        torch.testing.assert_close(module(*call), by_its_own_loop(module, *call), atol=1e-5, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 18), st.data())
def test_any_spread_of_tokens_over_experts(tokens: int, experts: int, data: st.DataObject) -> None:
    per_token = data.draw(st.integers(1, experts))
    used = data.draw(st.integers(per_token, experts))  # the others get no token at all
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64]))
    module = make_experts(hidden=8, inner=8, experts=experts, seed=tokens).to(dtype)
    hidden, index, weights = make_calls(tokens, used, per_token, hidden=8, seed=experts)
    index = (index + data.draw(st.integers(0, experts - 1))) % experts
    with torch.no_grad():
        found = module(hidden.to(dtype), index, weights.to(dtype))
        assert found.dtype == dtype
        expected = one_pair_at_a_time(module, hidden, index, weights)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("inner", [24, 23], ids=["grouped", "not aligned"])
def test_bfloat16_is_within_its_own_rounding(inner: int) -> None:
    module = make_experts(inner=inner).to(torch.bfloat16)
    hidden, index, weights = make_calls(tokens=40, experts=5, per_token=2, hidden=32)
    hidden = hidden.to(torch.bfloat16)
    with torch.no_grad():
        # Routers of some families weigh in float32 whatever the model's dtype.
        found = module(hidden, index, weights)
        expected = one_pair_at_a_time(module, hidden, index, weights)
        own = by_its_own_loop(module, hidden, index, weights)
    assert found.dtype == torch.bfloat16
    error, own_error = ((x.double() - expected).abs().max() for x in (found, own))
    assert error <= 0.02 * expected.abs().max() and error <= 1.5 * own_error


@pytest.mark.parametrize("inner", [24, 23], ids=["grouped", "not aligned"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_those_of_the_models_own_loop(kind: str, inner: int) -> None:
    module = make_experts(kind, inner=inner)
    hidden, index, weights = make_calls(tokens=9, experts=5, per_token=2, hidden=32)
    index = index.clamp(max=3)  # the last expert gets nothing, so its gradient is zero
    towards = torch.randn(9, 32)
    found = []
    for compute in (module, lambda *call: by_its_own_loop(module, *call)):
        leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_(), *module.parameters()]
        out = compute(leaves[0], index, leaves[1])
        found.append(torch.autograd.grad((out * towards).sum(), leaves))
    for mine, own in zip(*found, strict=True):
        torch.testing.assert_close(mine, own, atol=1e-4, rtol=1e-4)
    assert (found[0][2][4] == 0).all() and (found[0][2][3] != 0).any()


def test_an_expert_that_was_not_chosen_may_overflow() -> None:
    module = make_experts(inner=23)
    with torch.no_grad():
        module.down_proj[2] = float("inf")
        hidden, index, weights = make_calls(tokens=6, experts=2, per_token=2, hidden=32)
        assert module(hidden, index, weights).isfinite().all()


def test_rows_are_written_from_the_first_and_only_while_recording() -> None:
    module = make_experts()
    module.headrace_column = 1
    recorder = RoutingRecorder(RoutingShape(layers=(0, 3), per_token=2, experts=5), tokens=6, device="cpu")
    address = recorder.chosen.data_ptr()
    long, short = (make_calls(n, 5, 2, 32, seed=n) for n in (6, 2))
    with torch.no_grad():
        with recording(recorder):
            module(*long)
            module(*short)
        module(*make_calls(4, 5, 2, 32, seed=4))
        elsewhere = threading.Thread(target=module, args=make_calls(3, 5, 2, 32, seed=3))
        with recording(recorder):
            elsewhere.start()
            elsewhere.join(60)
    assert recorder.chosen.dtype == torch.int16 and recorder.chosen.data_ptr() == address
    assert recorder.chosen[:, 1].tolist() == short[1].tolist() + long[1][2:].tolist()
    assert not recorder.chosen[:, 0].any()


@pytest.mark.parametrize(("tokens", "per_token"), [(7, 2), (3, 1)])
def test_a_pass_that_does_not_fit_is_refused(tokens: int, per_token: int) -> None:
    module = make_experts()
    module.headrace_column = 0
    recorder = RoutingRecorder(RoutingShape(layers=(0,), per_token=2, experts=5), tokens=6, device="cpu")
    with recording(recorder), pytest.raises(ValueError, match=rf"{tokens} tokens of {per_token} experts do not fit"):
        module(*make_calls(tokens, 5, per_token, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_layer_records_and_is_compiled_once(dtype: torch.dtype) -> None:
    module = make_experts(experts=11).to(dtype)
    module.headrace_column = 0
    prepare_to_compile(module)
    compiles = 0

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return graph.forward

    torch._dynamo.reset()
    layer = torch.compile(module, backend=backend, fullgraph=True, dynamic=True)
    recorders = [RoutingRecorder(RoutingShape((0,), 3, 11), tokens=n, device="cpu") for n in (12, 20)]
    with torch.inference_mode():
        for tokens, recorder in ((5, None), (12, recorders[0]), (9, recorders[1]), (20, recorders[1])):
            hidden, index, weights = make_calls(tokens, 11, 3, 32, seed=tokens)
            call = (hidden.to(dtype), index, weights.to(dtype))
            if recorder is None:
                found = layer(*call)
            else:
                with recording(recorder):
                    found = layer(*call)
                assert recorder.chosen[:tokens, 0].tolist() == index.tolist()
            torch.testing.assert_close(found, module(*call))
    assert compiles == 1


def test_the_record_survives_the_removal_of_dead_code() -> None:
    module = make_experts()
    module.headrace_column = 0
    prepare_to_compile(module)
    torch._dynamo.reset()
    layer = torch.compile(module, backend="aot_eager", fullgraph=True)
    recorder = RoutingRecorder(RoutingShape((0,), 2, 5), tokens=4, device="cpu")
    call = make_calls(4, 5, 2, 32)
    with torch.inference_mode(), recording(recorder):
        layer(*call)
    assert recorder.chosen[:, 0].tolist() == call[1].tolist()


TINY = {
    "vocab_size": 33,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": None,
}


def make_model(family: str, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**TINY, **changes}))


@pytest.mark.parametrize(
    ("family", "changes", "layers", "experts"),
    [
        ("qwen3_moe", {"num_hidden_layers": 5, "decoder_sparse_step": 2, "num_experts": 6}, (1, 3), 6),
        ("qwen2_moe", {"num_hidden_layers": 5, "mlp_only_layers": [0, 3], "num_experts": 6}, (1, 2, 4), 6),
        ("mixtral", {"num_hidden_layers": 11, "num_local_experts": 4}, tuple(range(11)), 4),
    ],
)
def test_layers_that_route(family: str, changes: dict[str, Any], layers: tuple[int, ...], experts: int) -> None:
    model = make_model(family, moe_intermediate_size=16, **changes)
    assert prepare_experts(model) == RoutingShape(layers=layers, per_token=3, experts=experts)
    assert prepare_experts(model) == RoutingShape(layers=layers, per_token=3, experts=experts)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3_moe", {"mlp_only_layers": [0, 1], "num_experts": 6})],
)
def test_a_model_without_experts_has_no_routing(family: str, changes: dict[str, Any]) -> None:
    assert prepare_experts(make_model(family, num_hidden_layers=2, **changes)) is None


def test_experts_outside_of_the_interface_are_seen_but_not_recorded() -> None:
    shape = prepare_experts(make_model("llama4_text", num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=1))
    assert shape == RoutingShape(layers=(), per_token=1, experts=4, recorded=False)
    with pytest.raises(ModelError, match="cannot be recorded") as caught:
        RoutingRecorder(shape, tokens=1, device="cpu")
    assert "\n" not in str(caught.value)

"""Rounding to FP8 and its products, against values computed by hand and products in float64."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "integration"))

from tiny_models import make_model

from headrace.engines.embedded.projections import merge_equal_products, prepare_to_merge
from headrace.errors import ModelError
from headrace.models import fp8
from headrace.models.attention import ReferenceContext, attending, prepare_to_compile
from headrace.models.fp8 import FP8, Fp8Linear, fp8_arrivals, fp8_product, quantize_linears, quantize_rows
from headrace.models.loading import named_weights


def rounded(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Fp8Linear)}


def test_rows_are_rounded_as_computed_by_hand() -> None:
    values, scales = quantize_rows(
        torch.tensor([[896.0, -2.25, 0.3, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 0.5, 0.7, 0.1]])
    )
    assert values.dtype == FP8 and scales.tolist() == [[2.0], [1.0], [pytest.approx(1 / 448)]]
    # Row 0 in units of 2: 448, -1.125, 0.15; between powers of two e4m3 has 8 numbers, so 0.15 becomes 0.15625.
    assert values[0].tolist() == [448.0, -1.125, 0.15625, 0.0]
    assert values[1].tolist() == [0.0] * 4
    # 0.7 * 448 = 313.6 lies between 288 and 320; 0.1 * 448 = 44.8 between 44 and 48.
    assert values[2].tolist() == [-448.0, 224.0, 320.0, 44.0]


def test_every_fp8_number_is_kept_and_errors_are_bounded() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = numbers[numbers.isfinite()]
    assert numbers.abs().max() == 448.0
    values, scales = quantize_rows(numbers[None])
    assert scales.item() == 1.0 and torch.equal(values[0].float(), numbers)
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 64)[:, None]
    values, scales = quantize_rows(rows)
    # Half a step: a sixteenth of the number, or half of the smallest number in units of the scale.
    assert ((values.float() * scales - rows).abs() <= torch.maximum(rows.abs() / 16, scales * 2**-10) * 1.0001).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible_in_its_row_alone(bad: float) -> None:
    rows = torch.ones(2, 16)
    rows[0, 3] = bad
    values, scales = quantize_rows(torch.eye(16))
    product = fp8_product(rows, values, scales[:, 0])
    assert product[0].isnan().any()
    torch.testing.assert_close(product[1], torch.ones(16))


def test_a_product_is_that_of_the_rounded_numbers() -> None:
    noise = torch.Generator().manual_seed(1)
    hidden, weights = torch.randn(2, 7, 48, generator=noise), torch.randn(32, 48, generator=noise)
    values, scales = quantize_rows(weights)
    tokens, of_tokens = quantize_rows(hidden.view(14, 48))
    expected = (tokens.double() * of_tokens.double()) @ (values.double() * scales.double()).t()
    found = fp8_product(hidden, values, scales[:, 0])
    assert found.shape == (2, 7, 32)
    torch.testing.assert_close(found.view(14, 32), expected.float(), rtol=1e-5, atol=1e-5)
    exact = (hidden.view(14, 48) @ weights.t()).double()
    assert 0.005 < ((found.view(14, 32) - exact).norm() / exact.norm()).item() < 0.06
    in_half = fp8_product(hidden.bfloat16(), values, scales[:, 0])
    assert in_half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "of_a_layer"),
    [
        ("llama", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
         | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        ("phi3", {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}),
        ("mixtral", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("gpt_oss", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
    ],
)  # fmt: skip
def test_linear_layers_are_rounded_and_nothing_else(family: str, of_a_layer: set[str]) -> None:
    model = make_model(family)
    before = {name: weight.clone() for name, weight in named_weights(model).items()}
    quantize_linears(model)
    layers = range(model.config.num_hidden_layers)
    assert rounded(model) == {f"model.layers.{layer}.{name}" for layer in layers for name in of_a_layer}
    after = named_weights(model)
    scales = {f"{name}.weight_scale" for name in rounded(model)}
    assert set(after) == set(before) | scales, "every weight keeps its name"
    for name, weight in before.items():
        module = name.removesuffix(".weight")
        if module in rounded(model):
            values, found = quantize_rows(weight)
            assert torch.equal(after[name].float(), values.float())
            assert torch.equal(after[f"{module}.weight_scale"], found[:, 0])
        else:
            assert torch.equal(after[name], weight)
    quantize_linears(model)
    assert named_weights(model).keys() == after.keys(), "a second call changes nothing"


def test_layers_that_read_the_same_input_lie_one_after_another() -> None:
    model = make_model("qwen2")
    quantize_linears(model)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.joined is attention.k_proj.joined is attention.v_proj.joined
    parts = [layer.weight for layer in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert torch.equal(torch.cat([part.float() for part in parts]), attention.q_proj.joined.float())
    parts[1].data.zero_()
    assert not attention.v_proj.joined[64:96].float().any(), "they are the same memory"
    assert attention.q_proj.bias is not None
    hidden = torch.randn(1, 3, 64)
    bare = fp8_product(hidden, attention.q_proj.weight, attention.q_proj.weight_scale)
    torch.testing.assert_close(attention.q_proj(hidden), bare + attention.q_proj.bias)


def test_a_model_without_such_layers_is_refused() -> None:
    model = make_model("llama", hidden_size=24, intermediate_size=24, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(ModelError, match="LlamaForCausalLM has no linear layer that can be in FP8"):
        quantize_linears(model)


def test_arrivals_become_what_the_model_would_be_rounded_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = make_model("qwen3"), make_model("qwen3", seed=1)
    arrived = {name: weight.clone() for name, weight in named_weights(other).items()}
    quantize_linears(model)
    quantize_linears(other)
    live = named_weights(model)
    arrivals = fp8_arrivals(model, live)
    assert arrivals is not None
    assert {name: (t.shape, t.dtype) for name, t in arrivals.arriving.items()} == {
        name: (t.shape, t.dtype) for name, t in arrived.items()
    }
    monkeypatch.setattr(fp8, "CHUNK", 640)  # Ten rows of most layers at a time: no part of them depends on another.
    arrivals.convert(arrived, live)
    for name, expected in named_weights(other).items():
        assert torch.equal(live[name].float(), expected.float()), name
    assert fp8_arrivals(make_model("qwen3"), {}) is None


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
def test_compiled_layers_compute_the_products_of_one_input_together(family: str) -> None:
    model = make_model(family, num_hidden_layers=4)
    quantize_linears(model)
    ids = torch.arange(9)[None]

    def logits() -> torch.Tensor:
        with torch.inference_mode(), attending(ReferenceContext([9])):
            return model(input_ids=ids, position_ids=ids, use_cache=False).logits

    expected, products = logits(), []

    def count(graph: Any) -> int:
        return sum(node.target is fp8_product for node in graph.graph.nodes)

    def backend(graph: Any, inputs: Any) -> Any:
        before = count(graph)
        merge_equal_products(graph)
        products.append((before, count(graph)))
        return graph.forward

    prepare_to_merge()
    prepare_to_compile(model)
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, fullgraph=True, backend=backend)
    torch.testing.assert_close(logits(), expected, rtol=1e-5, atol=1e-5)
    assert products == [(7, 4)], "one graph for all layers: q, k, v are one product, gate and up another"

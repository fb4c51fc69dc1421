"""Fused projections compute the same, and their parameters stay where weights are delivered to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.delivery.digest import digest_as
from headrace.engines.embedded.projections import fuse_projections, merge_equal_products
from headrace.models.loading import named_weights

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
IDS = torch.arange(12)[None] * 5 % 64


def make(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they start at zero
                parameter.normal_()
    return model


# qwen2 has biases, phi3 has fused projections of its own, and a shared expert has a gate and an up projection.
@pytest.mark.parametrize(
    ("family", "changes", "groups"),
    [
        ("llama", {}, 4),
        ("qwen2", {}, 4),
        ("qwen3", {}, 4),
        ("phi3", {}, 0),
        ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}, 4),
    ],
)
def test_a_fused_model_computes_the_same_under_the_same_names(family: str, changes: Any, groups: int) -> None:
    model = make(family, **changes)
    plain, weights = copy.deepcopy(model), named_weights(model)
    shapes, digest = {name: w.shape for name, w in weights.items()}, digest_as(weights, "float32")
    assert fuse_projections(model) == groups
    found = named_weights(model)
    assert {name: w.shape for name, w in found.items()} == shapes and list(found) == list(shapes)
    assert all(w.is_contiguous() for w in found.values()) and digest_as(found, "float32") == digest
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits, atol=1e-5, rtol=1e-5)


def test_weights_that_are_copied_into_parameters_are_computed_with() -> None:
    model, other = make("qwen2"), make("qwen2", initializer_range=0.3)
    fuse_projections(model)
    with torch.inference_mode():
        for name, weight in named_weights(model).items():
            weight.copy_(named_weights(other)[name])
        torch.testing.assert_close(model(IDS).logits, other(IDS).logits, atol=1e-5, rtol=1e-5)


def test_parameters_of_a_group_are_views_of_one_memory() -> None:
    model = make("qwen2")
    bytes_before = sum(w.nbytes for w in named_weights(model).values())
    fuse_projections(model)
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    for name in ("weight", "bias"):
        storages = {getattr(part, name).untyped_storage().data_ptr() for part in parts}
        assert len(storages) == 1
    memory = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in named_weights(model).values()}
    assert sum(memory.values()) == bytes_before


def test_other_projections_stay_as_they_are() -> None:
    model = make("llama")
    first, second = model.model.layers
    first.self_attn.q_proj = torch.nn.Sequential(first.self_attn.q_proj)  # as an adapter wraps it
    second.mlp.up_proj = second.mlp.up_proj.double()
    kept = first.self_attn.k_proj, second.mlp.gate_proj
    assert fuse_projections(model) == 2
    assert (first.self_attn.k_proj, second.mlp.gate_proj) == kept


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_compiled_layer_computes_each_group_once(family: str) -> None:
    """Two layers share a compilation, with 4 products in place of 7: q with k and v, o, gate with up, down."""
    products: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        merge_equal_products(graph)
        products.append(sum(node.target is torch.nn.functional.linear for node in graph.graph.nodes))
        return graph.forward

    model = make(family)
    plain = copy.deepcopy(model)
    fuse_projections(model)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.self_attn.layer_idx = 0
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=True, fullgraph=True)
    with torch.inference_mode():
        for ids in (IDS, IDS[:, :5]):
            found, expected = (m(ids, use_cache=False).logits for m in (model, plain))
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert products == [4]

"""Weights in 4 bits against their definition written out, and layers that hold them so against dense ones."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.models.lora import frozen_linears
from headrace.models.rounding import BLOCK, LEVELS, FourBitLinear, hold_in_four_bits, round_weights, rounded


def linear(rows: int, columns: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(columns, rows, bias=bias)


def by_hand(weight: torch.Tensor) -> torch.Tensor:
    """Block by block, the level that is nearest."""
    flat, found = weight.flatten().tolist(), []
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        largest = max(abs(value) for value in block)
        for value in block:
            share = value / largest if largest else 0.0
            found.append(min(LEVELS, key=lambda level: abs(level - share)) * largest)
    return torch.tensor(found).view(weight.shape)


@pytest.mark.parametrize("bias", [False, True])
def test_slices_of_a_layer_are_the_layer(bias: bool) -> None:
    """Outputs one after the other, and the sum over slices of inputs, with gradients; blocks end inside of slices."""
    layer = linear(6, 50, bias=bias).requires_grad_(False)
    hidden = torch.randn(3, 50, requires_grad=True)
    whole = FourBitLinear(layer)(hidden)
    whole.square().sum().backward()
    expected, hidden.grad = hidden.grad, None
    outputs = []
    for index in range(2):
        part = FourBitLinear(layer)
        part.keep_slice(0, index, 2)
        outputs.append(part(hidden))
    joined = torch.cat(outputs, -1)
    torch.testing.assert_close(joined, whole)
    joined.square().sum().backward()
    torch.testing.assert_close(hidden.grad, expected)
    hidden.grad = None
    results = []
    for index, inputs in enumerate(hidden.chunk(2, -1)):
        part = FourBitLinear(layer)
        part.keep_slice(1, index, 2)
        results.append(part(inputs))
    torch.testing.assert_close(results[0] + results[1], whole)
    (results[0] + results[1]).square().sum().backward()
    torch.testing.assert_close(hidden.grad, expected)


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Seven steps below zero and eight above it, alike in probability, up to where the outermost lies."""
    assert len(LEVELS) == 16 and LEVELS[0] == -1 and LEVELS[7] == 0 and LEVELS[15] == 1
    normal = statistics.NormalDist()
    outermost = 0.9677083
    upper = [normal.inv_cdf(0.5 + (outermost - 0.5) * i / 8) for i in range(9)]
    lower = [-normal.inv_cdf(0.5 + (outermost - 0.5) * (7 - i) / 7) for i in range(8)]
    expected = [value / upper[-1] for value in lower] + [value / upper[-1] for value in upper[1:]]
    assert list(LEVELS) == pytest.approx(expected, abs=1e-5)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_a_weight_becomes_the_nearest_level_of_its_block(rows: int, columns: int, seed: int) -> None:
    layer = linear(rows, columns, seed=seed)
    with torch.no_grad():
        layer.weight[0] = 0.0  # a block, or a part of one, that is all zero
    expected = by_hand(layer.weight.detach())
    round_weights({"layer": layer})
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=0, atol=1e-7)
    once = layer.weight.detach().clone()
    round_weights({"layer": layer})
    assert torch.equal(layer.weight, once), "what is rounded is rounded"


def test_a_narrower_layer_is_rounded_from_its_source() -> None:
    source = linear(8, 64)
    narrow = linear(8, 64).to(torch.bfloat16)
    round_weights({"layer": narrow}, {"layer": source})
    round_weights({"layer": source})
    assert torch.equal(narrow.weight, source.weight.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_in_four_bits_computes_what_the_rounded_one_does(dtype: torch.dtype, bias: bool) -> None:
    dense = linear(24, 40, bias=bias)
    round_weights({"layer": dense})
    held = FourBitLinear(dense)
    dense, held = dense.to(dtype), held.to(dtype)
    assert held.packed.nbytes + held.scales.nbytes <= 24 * 40 * (4 + 0.5) / 8
    hidden = torch.randn(3, 5, 40, dtype=dtype)
    outputs, gradients = [], []
    for layer in (dense, held):
        given = hidden.clone().requires_grad_()
        output = layer(given)
        output.square().sum().backward()
        outputs.append(output.detach())
        gradients.append(given.grad)
    assert torch.equal(*outputs)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert not [name for name, _ in held.named_parameters() if name != "bias"]
    assert not held.state_dict().keys() - {"bias"}


@pytest.mark.parametrize("compiled", [False, True])
def test_no_weight_is_kept_for_the_backward_pass(compiled: bool) -> None:
    layers = nn.Sequential(FourBitLinear(linear(192, 64)), nn.SiLU(), FourBitLinear(linear(64, 192)))
    forward = layers.forward
    if compiled:
        # The partition of inductor, without its kernels.
        forward = torch.compile(forward, dynamic=True, fullgraph=True, backend="aot_eager_decomp_partition")
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    hidden = torch.randn(5, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward(hidden)
    assert kept
    assert not [tensor.shape for tensor in kept if tensor.is_floating_point() and tensor.numel() == 192 * 64]
    output.sum().backward()
    (expected,) = torch.autograd.grad(layers(hidden).sum(), hidden)
    torch.testing.assert_close(hidden.grad, expected)


def test_weights_may_be_rounded_once_more() -> None:
    """As a trainer scores a canary whose engine serves 16 bits."""
    layer = linear(24, 40)
    held = nn.Sequential(FourBitLinear(layer))
    round_weights({"layer": layer})
    hidden = torch.randn(3, 40)
    with torch.no_grad(), rounded(held, torch.bfloat16):
        found = held(hidden)
    assert torch.equal(found, nn.functional.linear(hidden, layer.weight.to(torch.bfloat16).float()))
    assert not torch.equal(found, held(hidden))
    with rounded(held, torch.bfloat16), pytest.raises(ValueError, match="have no gradients"):
        held(hidden.requires_grad_())


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=61, num_key_value_heads=2, **sizes)
    return AutoModelForCausalLM.from_config(config).eval()


def test_all_linear_layers_are_taken_but_the_head_and_what_is_trained() -> None:
    whole = model()
    names = set(frozen_linears(whole))
    assert len(names) == 14 and "lm_head" not in names
    spared = names - set(frozen_linears(whole, ("0.mlp", "v_proj")))
    assert spared == {name for name in names if name.endswith("v_proj") or ".0.mlp." in name}


def test_a_model_in_four_bits_is_the_rounded_model() -> None:
    whole, held = model(), model()
    ids = torch.arange(1, 12)[None]
    before = whole(ids).logits
    for each in (whole, held):
        round_weights(frozen_linears(each))
    hold_in_four_bits(held, frozen_linears(held))
    assert sum(isinstance(module, FourBitLinear) for module in held.modules()) == 14
    assert torch.equal(held(ids).logits, whole(ids).logits)
    assert float((whole(ids).logits - before).abs().max()) > 1e-3

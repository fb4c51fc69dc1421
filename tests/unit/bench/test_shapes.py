"""Named shapes: the models that they claim to be, made without rounding what must not be rounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.bench.base import SHAPES, build_shape
from headrace.errors import ModelError
from headrace.models.attention import ATTENTION

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_shape_has_the_parameters_of_the_published_model(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name]())
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    config = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 100_000.0}
    monkeypatch.setitem(SHAPES, "tiny", lambda: LlamaConfig(vocab_size=64, rope_parameters=rope, **config))
    return "tiny"


def test_a_shape_is_made_in_its_dtype_but_for_rotary_frequencies(tiny: str) -> None:
    model = build_shape(tiny, "bfloat16", "cpu", 0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    exact = 100_000.0 ** -(np.arange(0, 16, 2) / 16)
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.double().numpy(), exact, rtol=1e-6)
    assert model.config._attn_implementation == ATTENTION and not model.training


def test_weights_follow_from_the_seed_alone(tiny: str) -> None:
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    first = build_shape(tiny, "float32", "cpu", 5).state_dict()
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's random numbers are not used up"
    torch.manual_seed(7)
    again, other = (build_shape(tiny, "float32", "cpu", seed).state_dict() for seed in (5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"no shape 'gpt-5'.*smollm2-135m"):
        build_shape("gpt-5", "float32", "cpu", 0)

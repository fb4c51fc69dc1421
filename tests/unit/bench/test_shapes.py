"""Named shapes: the models that they claim to be, made without rounding what must not be rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.bench.base import build_random, build_shape
from headrace.bench.shapes import SHAPES
from headrace.errors import ModelError
from headrace.models.attention import ATTENTION

PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
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


def test_a_directory_without_weights_gives_the_model_of_its_configuration(tiny: str, tmp_path: Path) -> None:
    SHAPES[tiny]().save_pretrained(tmp_path)
    shape, found = build_shape(tiny, "bfloat16", "cpu", 5), build_random(tmp_path, "bfloat16", "cpu", 5)
    assert {p.dtype for p in found.parameters()} == {torch.bfloat16}
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in shape.state_dict().items())


def test_random_weights_are_made_on_the_device_that_was_asked_for(tiny: str, tmp_path: Path) -> None:
    """No copy in host memory: the weights of 30B parameters would take minutes there."""
    SHAPES[tiny]().save_pretrained(tmp_path)
    made: list[str] = []

    class Makes(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            found = function(*given, **(named or {}))
            made.extend(t.device.type for t in [found] if isinstance(t, torch.Tensor) and t.numel() >= 32 * 32)
            return found

    with Makes():
        build_random(tmp_path, "float32", "meta", 0)
    assert made and set(made) == {"meta"}


def test_a_directory_that_is_no_causal_model_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing-of-this-name"}')
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        build_random(tmp_path, "float32", "cpu", 0)


def test_an_unknown_shape_names_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"no shape 'gpt-5'.*smollm2-135m"):
        build_shape("gpt-5", "float32", "cpu", 0)

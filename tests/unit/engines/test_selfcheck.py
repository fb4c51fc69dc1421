"""What would be served wrongly is refused, in one line; what fits passes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.errors import ModelError
from headrace.models.attention import ATTENTION, AttentionCall, ReferenceContext, check_model
from headrace.models.loading import load_model

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def configure(family: str, **changes: Any) -> Any:
    values = {key: value for key, value in {**TINY, **changes}.items() if value != "absent"}
    return AutoConfig.for_model(family, **values)


def build(family: str, **changes: Any) -> Any:
    config = configure(family, **changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "alibi of bloom": ("bloom", {"n_head": 4, "n_layer": 2}, "attention"),
    "alibi of falcon": ("falcon", {"alibi": True, "head_dim": "absent"}, "attention|ALiBi"),
    "falcon": ("falcon", {"alibi": False, "head_dim": "absent"}, "attention interface"),
    "gpt-j": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "attention interface"),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
    "linear attention": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        "linear_attention",
    ),
    "state space": ("mamba", {"state_size": 4}, "attention"),
    "dynamic rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "dynamic",
    ),
    "bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}, "not causal"),
    "a window in the mask only": (
        "phimoe",
        {"sliding_window": 6, "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "window",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    family, changes, word = REFUSED[case]
    configure(family, **changes).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=word) as refused:
        check_model(load_model(tmp_path, weights="random"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe", "stablelm", "granite", "cohere"])
def test_what_fits_passes_and_is_left_as_it_was(family: str) -> None:
    model = build(family)
    check_model(model)
    assert model.config._attn_implementation == ATTENTION
    with pytest.raises(RuntimeError, match="attending"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_longrope_is_refused_only_beyond_its_original_length() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    model = build("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    check_model(model, 64)
    for length in (65, None):
        with pytest.raises(ModelError, match="longrope"):
            check_model(model, length)


class Faulty(ReferenceContext):
    fault = ""

    def visible(self, window: int | None) -> torch.Tensor:
        seen = super().visible(window)
        if self.fault == "leak":
            return torch.ones_like(seen)
        if self.fault == "blind to the token before":
            return seen & ~torch.ones_like(seen).tril(-1).triu(-1)
        return seen

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self.fault == "scale":
            call = AttentionCall(**{**call.__dict__, "scaling": call.scaling * 1.5})
        if self.fault == "softcap":
            call = AttentionCall(**{**call.__dict__, "softcap": None})
        if self.fault == "window":
            self.windows[call.layer] = call.window
            out = super().attend(AttentionCall(**{**call.__dict__, "window": None}))
            self.windows[call.layer] = call.window
            return out
        return super().attend(call)


@pytest.mark.parametrize(
    ("fault", "family", "changes"),
    [
        ("leak", "llama", {}),
        ("scale", "llama", {"initializer_range": 0.2}),
        ("softcap", "gemma2", {"initializer_range": 0.2, "attn_logit_softcapping": 2.0}),
        ("window", "mistral", {"sliding_window": 6}),
    ],
)
def test_the_check_notices_a_difference(
    fault: str, family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family, **changes)
    check_model(model)
    monkeypatch.setattr(Faulty, "fault", fault)
    monkeypatch.setattr("headrace.models.attention.ReferenceContext", Faulty)
    with pytest.raises(ModelError, match="differ"):
        check_model(model)


def test_an_unknown_argument_of_attention_is_refused() -> None:
    model = build("llama")
    model.forward = functools.partial(model.forward, temperature=2.0)
    with pytest.raises(ModelError, match=r"cannot be served: .*temperature"):
        check_model(model)


def test_in_16_bits_rounding_passes_and_a_wrong_mask_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("gemma2", initializer_range=0.2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION).eval()
    check_model(model)
    monkeypatch.setattr(Faulty, "fault", "blind to the token before")
    monkeypatch.setattr("headrace.models.attention.ReferenceContext", Faulty)
    with pytest.raises(ModelError, match="differ from the model's own attention"):
        check_model(model)

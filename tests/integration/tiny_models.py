"""Small random models of many families, and plain Hugging Face references for them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engines.base import Delta, Request, Sampling
from headrace.models.attention import ATTENTION

VOCABULARY = 97
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # random models of the usual range give nearly tied logits
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WINDOW = 8
_MOE = {"num_experts_per_tok": 2, "initializer_range": 0.15}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"initializer_range": 0.15},
    "qwen3": {},
    "mistral": {"sliding_window": _WINDOW},
    "gemma2": {"sliding_window": _WINDOW, "num_hidden_layers": 4, "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        "sliding_window": _WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3": {},
    "olmo2": {},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4, **_MOE},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 48, **_MOE},
    "gpt_oss": {"sliding_window": _WINDOW, "num_local_experts": 4, **_MOE},
}


def make_model(family: str, seed: int = 0, **changes: Any) -> Any:
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES.get(family, {}), **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def plain(model: Any) -> Any:
    """The same weights under the model's own attention."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def prompts(lengths: list[int], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCABULARY, n).astype(np.int32) for n in lengths]


def request(name: str, prompt: np.ndarray, max_tokens: int, group: str = "", **sampling: Any) -> Request:
    return Request(id=name, token_ids=prompt, group=group, sampling=Sampling(max_tokens=max_tokens, **sampling))


@torch.no_grad()
def reference_logprobs(reference: Any, prompt: np.ndarray, completion: np.ndarray, temperature: float = 1.0) -> Any:
    """Log-probabilities [n, V] before each token of the completion, by one plain forward."""
    ids = torch.tensor(np.concatenate([prompt, completion]), dtype=torch.long, device=reference.device)[None]
    logits = reference(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).cpu().numpy()


@torch.no_grad()
def reference_greedy(reference: Any, prompt: np.ndarray, max_tokens: int) -> list[int]:
    ids = torch.tensor(prompt, dtype=torch.long, device=reference.device)[None]
    out = reference.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def join(deltas: list[Delta]) -> dict[str, Delta]:
    """All deltas of each request as one; nothing may follow the one that ends it."""
    whole: dict[str, Delta] = {}
    for delta in deltas:
        before = whole.get(delta.id)
        if before is None:
            whole[delta.id] = delta
            continue
        assert before.finish is None, f"{delta.id} goes on after its end"
        whole[delta.id] = Delta(
            id=delta.id,
            token_ids=np.concatenate([before.token_ids, delta.token_ids]),
            logprobs=np.concatenate([before.logprobs, delta.logprobs]),
            versions=np.concatenate([before.versions, delta.versions]),
            finish=delta.finish,
            error=delta.error,
        )
    return whole


def run_out(core: Any, limit: int = 2000, begun: Sequence[Delta] = ()) -> dict[str, Delta]:
    deltas = list(begun)
    for _ in range(limit):
        if not core.has_work:
            return join(deltas)
        deltas += core.step()
    raise AssertionError(f"still at work after {limit} steps")

"""Small random models of several families, once for Headrace and once plain, and batches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen3Config,
)

from headrace.models.attention import ATTENTION
from headrace.types import NO_EXPERT, NO_VERSION, Batch

VOCABULARY = 61
LAYERS, EXPERTS, CHOSEN = 2, 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES),
    # A window shorter than the sequences, on one of the two layers; capped scores and capped logits.
    "gemma2": lambda: Gemma2Config(
        **SIZES, sliding_window=5, attn_logit_softcapping=3.0, final_logit_softcapping=4.0, query_pre_attn_scalar=16
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=4),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def twins(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, Any]:
    """The same random model twice: with Headrace's attention, and plain with eager attention."""
    torch.manual_seed(seed)
    models = [
        AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype, attn_implementation=attention).eval()
        for attention in (ATTENTION, "eager")
    ]
    for model in models:
        # Experts one by one in both: the grouped kernels do not have float64.
        if hasattr(model.config, "num_local_experts"):
            model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in models[0].named_parameters():
            if "sinks" in name:
                parameter.normal_()
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1]


class AllDouble(TorchFunctionMode):
    """Computes in float64 what models ask to be computed in float32 (norms, softmax, rotary tables).

    Without it no two ways of computing one thing agree to more than float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


def model_dir(path: Path, family: str = "llama", seed: int = 0) -> Path:
    """A model directory with random weights and stand-ins for the tokenizer's files."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text(f'{{"file": "{name}"}}')
    (path / "chat_template.jinja").write_text("{{ messages }}")
    return path


def poisoned(batch: Batch, where: Any = slice(None)) -> Batch:
    """This batch with numbers at these tokens that are finite, and a loss and gradients that are not."""
    huge = {"advantages": batch.advantages.copy(), "weights": batch.weights.copy()}
    for values in huge.values():
        values[where] = np.where(batch.trained[where], 1e30, values[where])
    return msgspec.structs.replace(batch, **huge)


def random_batch(
    seed: int = 0, *, groups: int = 3, size: int = 3, step: int = 1, temperature: float = 1.0, objective: Any = "policy"
) -> Batch:
    """Groups of answers with a common prompt; some trained spans have gaps (a tool's answer), one answer is one token.

    The recorded log-probabilities are near those of a flat distribution, so that some ratios are clipped.
    """
    rng = np.random.default_rng(seed)
    tokens, trained, lengths, numbers = [], [], [], []
    for group in range(groups):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(3, 12)))
        for member in range(size):
            answer = rng.integers(3, VOCABULARY, 1 if member == 1 else int(rng.integers(2, 14)))
            mask = np.ones(len(answer), bool)
            if member == 2:
                mask[1:3] = False
            tokens.append(np.concatenate([prompt, answer]))
            trained.append(np.concatenate([np.zeros(len(prompt), bool), mask]))
            lengths.append(len(prompt) + len(answer))
            numbers.append(group)
    flat = np.concatenate(trained)
    count = int(flat.sum())
    per_sequence = np.repeat(rng.normal(size=len(lengths)), lengths)
    return Batch(
        step=step,
        version=step,
        objective=objective,
        token_ids=np.concatenate(tokens).astype(np.int32),
        lengths=np.array(lengths, np.int32),
        groups=np.array(numbers, np.int32),
        trained=flat,
        logprobs=np.where(flat, -np.log(VOCABULARY) + rng.normal(size=len(flat)), 0).astype(np.float32),
        versions=np.where(flat, step, NO_VERSION).astype(np.int32),
        advantages=np.where(flat, per_sequence, 0).astype(np.float32),
        weights=np.where(flat, 1.0 / count, 0).astype(np.float32),
        temperature=temperature,
    )


def in_minibatches(batch: Batch, epochs: int = 2) -> Batch:
    """The same batch in two minibatches, whose weights are those of two steps."""
    of_sequence = batch.groups % 2
    of_token = np.repeat(of_sequence, batch.lengths)
    counts = np.array([(batch.trained & (of_token == number)).sum() for number in (0, 1)])
    weights = np.where(batch.trained, 1.0 / counts[of_token], 0).astype(np.float32)
    return msgspec.structs.replace(batch, minibatches=of_sequence.astype(np.int32), epochs=epochs, weights=weights)


def with_rewards(batch: Batch, seed: int = 0, constant: float | None = None) -> Batch:
    """Rewards for a critic: random ones at some tokens, or a constant at the end of each sequence."""
    rng = np.random.default_rng(seed)
    rewards = np.where(batch.trained & (rng.random(len(batch.trained)) < 0.4), rng.normal(size=len(batch.trained)), 0)
    if constant is not None:
        ends = np.cumsum(batch.lengths)
        rewards = np.zeros(len(batch.trained))
        for start, end in zip(ends - batch.lengths, ends, strict=True):
            rewards[start + np.flatnonzero(batch.trained[start:end])[-1]] = constant
    return msgspec.structs.replace(batch, rewards=rewards.astype(np.float32), advantages=0 * batch.advantages)


def with_credit(batch: Batch, seed: int = 0) -> Batch:
    """The same batch with an advantage of its own for every trained token."""
    drawn = np.random.default_rng(seed).normal(size=len(batch.trained))
    return msgspec.structs.replace(batch, advantages=np.where(batch.trained, drawn, 0).astype(np.float32))


def with_experts(batch: Batch, seed: int = 0, *, first_alike: bool = True) -> Batch:
    """Random experts for all trained tokens; the first ones of a group were drawn by one pass, or each by its own."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(batch.lengths)
    draws = rng.random((len(batch.token_ids), LAYERS, EXPERTS)).argsort(-1)[..., :CHOSEN].astype(np.int16)
    draws[~batch.trained] = NO_EXPERT
    firsts = [
        int(start + batch.trained[start:end].argmax()) for start, end in zip(ends - batch.lengths, ends, strict=True)
    ]
    if first_alike:
        for group in set(batch.groups.tolist()):
            places = [place for place, number in zip(firsts, batch.groups, strict=True) if number == group]
            draws[places] = draws[places[0]]
    return msgspec.structs.replace(batch, routing=draws)

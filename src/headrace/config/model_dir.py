"""What is known about a model directory without loading the model: its completeness, size and context length."""

import json
from math import prod
from pathlib import Path
from typing import Any

from msgspec import Struct
from safetensors import safe_open

from headrace.errors import ModelError

SHARDS = Path("trainer") / "shards"
"""The folder in which a checkpoint of several ranks keeps the shards of weights and optimizer."""


TOKENIZER = "tokenizer.json"


class ModelFacts(Struct, frozen=True, kw_only=True):
    """The figures of a model, read from its files."""

    architecture: str
    parameters: int
    layers: int
    kv_bytes_per_token: int
    """The bytes of keys and values per token, in float32."""
    vocabulary: int
    max_positions: int
    hidden: int = 0
    experts: int = 0
    """The number of experts in a layer; 0 for a model without experts."""


def check_model_dir(path: Path, weights: str, *, tokenizer: bool = False, key: str = "[model] path") -> dict[str, Any]:
    """Return the directory's config. Raises `ModelError`, which names `key` and says what is missing."""
    if not path.is_dir():
        raise ModelError(f"{key}: {path} is not a directory")
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{key}: {path} has no config.json")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{key}: {file} is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{key}: {file} has no model_type")
    if weights == "load" and not any(path.glob("*.safetensors")):
        if (path / SHARDS).is_dir():
            raise ModelError(
                f"{key}: {path} is a checkpoint of several ranks (headrace export RUN_DIR --to hf makes a model of it)"
            )
        raise ModelError(f'{key}: {path} has no *.safetensors weights (or set [model] weights = "random")')
    if tokenizer and not (path / TOKENIZER).is_file():
        raise ModelError(f"{key}: {path} has no {TOKENIZER}")
    return config


def check_teacher(path: Path, model: Path, weights: str = "load") -> None:
    """Raise `ModelError` unless the teacher's directory is complete and the teacher knows the model's tokens.

    Every token of the model's tokenizer must be the same token of the teacher's. Embeddings may have more rows than the
    tokenizer has tokens, but the teacher must have a row for every row of the model. A teacher's directory without a
    tokenizer is taken as it is, if both have as many rows.
    """
    key = "[algorithm] teacher"
    theirs, ours = (
        int(config.get("text_config", config).get("vocab_size", 0))
        for config in (check_model_dir(path, "load", key=key), check_model_dir(model, weights))
    )
    if not (path / TOKENIZER).is_file():
        if theirs != ours:
            raise ModelError(f"{key}: {path} has a vocabulary of {theirs} tokens, the model one of {ours}")
        return
    known = {id: token for token, id in _vocabulary(path, key).items()}
    for token, id in sorted(_vocabulary(model, "[model] path").items(), key=lambda pair: pair[1]):
        if known.get(id) != token:
            there = f"is {known[id]!r} there" if id in known else "does not exist there"
            raise ModelError(f"{key}: {path} has another tokenizer: token {id}, {token!r} in the model, {there}")
    if theirs < ours:
        raise ModelError(
            f"{key}: {path} has an embedding of {theirs} rows, the model one of {ours}; the teacher could not score "
            "every token that the model can draw"
        )


def _vocabulary(path: Path, key: str) -> dict[str, int]:
    """Return the id of every token of the directory's tokenizer."""
    from tokenizers import Tokenizer  # loaded late: most commands need no tokenizer

    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path / TOKENIZER))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"{key}: {path / TOKENIZER} cannot be read: {error}") from error
    found: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return found


def model_facts(path: Path, weights: str) -> ModelFacts:
    """Return figures for estimates. Parameters are counted in the weights' headers, or else derived from the config."""
    config = check_model_dir(path, weights)
    config = config.get("text_config", config)
    hidden = int(config.get("hidden_size", 0))
    layers = int(config.get("num_hidden_layers", 0))
    heads = int(config.get("num_attention_heads", 1))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head = int(config.get("head_dim") or (hidden // heads if heads else 0))
    vocabulary = int(config.get("vocab_size", 0))
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    parameters = sum(_count(file) for file in path.glob("*.safetensors")) if weights == "load" else 0
    if not parameters:
        inner = int(config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden)
        attention = hidden * head * (2 * heads + 2 * kv_heads)
        mlp = 3 * hidden * inner * max(experts, 1) + hidden * experts
        embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        parameters = layers * (attention + mlp + 2 * hidden) + embeddings + hidden
    return ModelFacts(
        architecture=str((config.get("architectures") or [config.get("model_type", "?")])[0]),
        parameters=parameters,
        layers=layers,
        kv_bytes_per_token=2 * layers * kv_heads * head * 4,
        vocabulary=vocabulary,
        max_positions=int(config.get("max_position_embeddings", 0)),
        hidden=hidden,
        experts=experts,
    )


def _count(file: Path) -> int:
    with safe_open(file, "numpy") as weights:
        return sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118

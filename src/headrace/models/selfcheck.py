"""The check before a model is served or trained: Headrace's attention computes what the model's own code would compute.

A model that does not fit (recurrent layers, position biases, masks that only the model knows) would give fluent but
wrong answers. So such a model is refused when it is loaded, with a one-line error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from headrace.errors import ModelError
from headrace.models.attention import ATTENTION, AttentionCall, attending

_STATEFUL = ("linear", "conv", "mamba", "recurrent", "ssm", "rwkv", "chunked")
_LONGEST_WINDOW = 64
"""The tiny forward pass is longer than windows up to this size. Longer windows are only compared with the
configuration."""
_TOLERANCE = {torch.float32: 5e-4, torch.float64: 5e-4}
"""The largest allowed difference of log-probabilities, relative to their spread."""
_COARSE, _COARSE_MEAN = 0.3, 0.05
"""The same for 16-bit dtypes, where rounding alone makes a deep model differ by 0.15; and the largest mean
difference."""


class ReferenceContext:
    """Attention within packed sequences in its plainest form: slow and obvious on purpose. It records every call."""

    def __init__(self, lengths: list[int]) -> None:
        self.layers: list[int] = []
        self.windows: dict[int, int | None] = {}
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        position = torch.cat([torch.arange(n) for n in lengths])
        self._distance = position[:, None] - position[None]
        self._visible = (sequence[:, None] == sequence[None]) & (self._distance >= 0)

    def visible(self, window: int | None) -> torch.Tensor:
        """Return which token (row) sees which (column): its own sequence up to itself, within the window. [T, T]."""
        return self._visible if window is None else self._visible & (self._distance < window)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return the attention output of one layer, [1, T, H, Dv]."""
        self.layers.append(call.layer)
        self.windows[call.layer] = call.window
        visible = self.visible(call.window)
        repeat = call.query.shape[1] // call.key.shape[1]
        key, value = (x.repeat_interleave(repeat, dim=1) for x in (call.key, call.value))
        scores = (call.query @ key.transpose(-1, -2)).float() * call.scaling
        if call.softcap is not None:
            scores = torch.tanh(scores / call.softcap) * call.softcap
        scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
        if call.sinks is not None:
            sinks = call.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return (weights.to(value.dtype) @ value).transpose(1, 2)


def check_model(model: Any, max_length: int | None = None) -> None:
    """Raise a one-line `ModelError` unless this model, loaded with Headrace's attention, computes what it should.

    `max_length` is the longest sequence that the model will see, if known: some rotary embeddings are safe only below a
    certain length.
    """
    name = type(model).__name__
    config = model.config.get_text_config()
    _check_config(name, config, max_length)
    window = getattr(config, "sliding_window", None) or 0
    lengths = [5, max(12, window + 4) if window <= _LONGEST_WINDOW else 12]
    device = next(model.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    # Any spread of token ids will do; a prime step keeps neighbours different.
    ids = (torch.arange(sum(lengths)) * 7919 + 11) % vocabulary
    context = ReferenceContext(lengths)
    try:
        packed = _packed_logprobs(model, ids.to(device), lengths, context)
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error
    _check_calls(name, config, context)
    alone = _eager_logprobs(model, ids.to(device), lengths)
    differences = (packed - alone).abs() / alone.std().clamp_min(1e-6)
    error_size, mean = float(differences.max()), float(differences.mean())
    if not (error_size <= _TOLERANCE.get(model.dtype, _COARSE) and mean <= _COARSE_MEAN):
        raise ModelError(
            f"{name} cannot be served: packed sequences differ from the model's own attention"
            f" (relative error {error_size:.2g})"
        )


def _check_config(name: str, config: Any, max_length: int | None) -> None:
    stateful = sorted({t for t in _layer_types(config) if any(word in t for word in _STATEFUL)})
    if stateful:
        raise ModelError(f"{name} cannot be served: it has {', '.join(stateful)} layers, only full attention is known")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise ModelError(f"{name} cannot be served: ALiBi position biases are not known")
    if getattr(config, "use_bidirectional_attention", None) or getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} cannot be served: its attention is not causal")
    for rope_type, original in _ropes(config):
        if "dynamic" in rope_type:
            raise ModelError(f"{name} cannot be served: dynamic rotary scaling depends on the rest of the batch")
        if rope_type == "longrope" and (max_length is None or original is None or max_length > original):
            raise ModelError(
                f"{name} cannot be served: longrope depends on the rest of the batch beyond"
                f" {original} tokens (set a longest length of at most that)"
            )


def _layer_types(config: Any) -> list[str]:
    for attribute in ("layer_types", "layers_block_type", "block_types"):
        if types := getattr(config, attribute, None):
            return [str(t) for t in types]
    return []


def _ropes(config: Any) -> Iterator[tuple[str, int | None]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for rope in nested or [parameters]:
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        yield str(rope.get("rope_type") or rope.get("type") or "default"), original


def _check_calls(name: str, config: Any, context: ReferenceContext) -> None:
    layers = int(config.num_hidden_layers)
    if not context.layers:
        raise ModelError(f"{name} cannot be served: it never calls transformers' attention interface")
    if sorted(context.layers) != list(range(layers)):
        raise ModelError(
            f"{name} cannot be served: its {layers} layers made {len(context.layers)} attention calls"
            f" to {len(set(context.layers))} layers, not one each"
        )
    configured = getattr(config, "sliding_window", None) or None
    types = _layer_types(config)
    for layer, window in sorted(context.windows.items()):
        sliding = types[layer] == "sliding_attention" if types else configured is not None
        if window != (configured if sliding else None):
            raise ModelError(
                f"{name} cannot be served: layer {layer} asks for a window of {window},"
                f" its configuration for {configured if sliding else None}"
            )


@torch.no_grad()
def _packed_logprobs(model: Any, ids: torch.Tensor, lengths: list[int], context: ReferenceContext) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in lengths]).to(ids.device)
    with attending(context):
        logits = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
    return torch.log_softmax(logits[0].float(), -1)


@torch.no_grad()
def _eager_logprobs(model: Any, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    try:
        logits = [model(input_ids=part[None], use_cache=False).logits[0] for part in torch.split(ids, lengths)]
    finally:
        model.set_attn_implementation(ATTENTION)
    return torch.log_softmax(torch.cat(logits).float(), -1)

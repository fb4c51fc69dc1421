"""One attention function, registered with transformers, that hands every call to the context in force.

The engine's context reads and writes a paged KV cache; the trainer's attends within packed sequences. Model code is
Hugging Face's in both. No mask is ever built by the model: the context alone decides who sees whom. Under
`torch.compile` the call is one operation that the compiler does not look into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from headrace.errors import ModelError

ATTENTION = "headrace"
"""The name to load models with: `attn_implementation=ATTENTION`."""

_IGNORED = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "is_causal"}
_IGNORED |= {"output_router_logits", "return_dict", "num_items_in_batch", "past_key_values", "cu_seq_lens_q"}


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention over packed tokens. T tokens, H query heads, K key/value heads, D the head size."""

    layer: int
    query: torch.Tensor  # [1, H, T, D]
    key: torch.Tensor  # [1, K, T, D], not repeated
    value: torch.Tensor  # [1, K, T, Dv]
    scaling: float
    window: int | None
    """A token sees itself and the `window - 1` before it; None sees all before it."""
    softcap: float | None
    sinks: torch.Tensor | None
    """[H]: logits of an attention sink per head (GPT-OSS)."""


class AttentionContext(Protocol):
    """Decides who sees whom for one forward pass."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attention output, [1, T, H, Dv]."""
        ...


_context: ContextVar[AttentionContext | None] = ContextVar("headrace_attention", default=None)


@contextmanager
def attending(context: AttentionContext) -> Iterator[None]:
    """Every attention call of the body goes to this context."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> AttentionContext:
    """The context in force."""
    context = _context.get()
    if context is None:
        raise RuntimeError("a model loaded for Headrace was called outside of `attending(...)`")
    return context


def _window_of(module: torch.nn.Module, kwargs: dict[str, Any]) -> int | None:
    # A keyword wins over the attribute: some families set the attribute on every layer and pass None for full ones.
    window = kwargs.pop("sliding_window") if "sliding_window" in kwargs else getattr(module, "sliding_window", None)
    return int(window) if window else None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    window = _window_of(module, kwargs)
    softcap = kwargs.pop("softcap", None)
    sinks = kwargs.pop("s_aux", None)
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _IGNORED)
    if unknown:
        raise ModelError(f"{type(module).__name__} asks its attention for {', '.join(unknown)}: not supported")
    layer = getattr(module, "layer_idx")  # noqa: B009 - not declared on nn.Module
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    if torch.compiler.is_compiling():
        return _opaque(query, key, value, sinks, layer, scale, window or 0, float(softcap or 0.0)), None
    return _in_context(query, key, value, sinks, int(layer), scale, window or 0, float(softcap or 0.0)), None


def _in_context(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    context = current_context()
    call = AttentionCall(
        layer=layer,
        query=query,
        key=key,
        value=value,
        scaling=scaling,
        window=window or None,
        softcap=softcap or None,
        sinks=sinks,
    )
    # In the layout that the compiler was promised.
    return context.attend(call).contiguous()


# To the compiler attention is one opaque operation: the context is found when it runs, not when it is compiled.
_opaque = torch.library.custom_op("headrace::attend", _in_context, mutates_args=())


@_opaque.register_fake
def _shape_of_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


AttentionInterface.register(ATTENTION, _attention)

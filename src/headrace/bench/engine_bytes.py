"""The bandwidth ceiling: the bytes that a decode step must read, and how fast this device moves bytes.

A step must read every weight once, and for each row the keys and values of all tokens before it. Nothing else is
counted, so an engine can come close to the ceiling but never exceed it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
_REPEATS = 7


@dataclass(frozen=True)
class Footprint:
    """The sizes of one model's parts in bytes."""

    weights: int
    """The bytes of all parameters."""
    shared: int
    """The bytes that every step reads: all parameters except the experts, and except an input embedding that is not
    tied to the output."""
    experts: int
    """The bytes of all experts of all layers."""
    expert_count: int
    """The number of experts in one layer."""
    experts_per_token: int
    kv_of_window: dict[int | None, int]
    """Attention window -> the bytes of one token's keys and values in all layers with this window. The window None
    means that a layer sees all tokens."""

    @property
    def kv_token(self) -> int:
        """The bytes of one token's keys and values in all layers."""
        return sum(self.kv_of_window.values())

    def weights_read(self, rows: float) -> float:
        """Return the bytes of weights that a step of this many rows reads.

        Of the experts, it counts the share that at least one row chooses, if rows choose at random.
        """
        if not self.expert_count:
            return float(self.shared)
        missed: float = (1 - self.experts_per_token / self.expert_count) ** rows
        return self.shared + self.experts * (1 - missed)

    def kv_read(self, contexts: Iterable[tuple[int, int]]) -> int:
        """Return the bytes of keys and values that decode steps read.

        `contexts` holds for each sequence the number of tokens it sees in its first and in its last step.
        """
        total = 0
        for first, last in contexts:
            for window, size in self.kv_of_window.items():
                total += size * _tokens_seen(first, last, window)
        return total


def decode_contexts(prompt: int, lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Return, for each answer, how many tokens its first and its last decode step see.

    The first token of an answer comes from the pass over the prompt, so an answer of one token has no decode step.
    """
    return [(prompt + 1, prompt + length - 1) for length in lengths if length > 1]


def _tokens_seen(first: int, last: int, window: int | None) -> int:
    """Return the sum of `min(n, window)` for n from first to last."""
    if last < first:
        return 0
    whole = last if window is None else min(last, window)
    below = (first + whole) * (whole - first + 1) // 2 if whole >= first else 0
    return below + (0 if window is None else window * (last - max(whole, first - 1)))


def footprint(model: Any) -> Footprint:
    """Compute the sizes of this model's parts from its parameters and its configuration."""
    config = model.config.get_text_config()
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    weights = sum(sizes.values())
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    unread = 0 if embedding is output else embedding.numel() * embedding.element_size()
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    layer = 2 * heads * head * model.dtype.itemsize
    return Footprint(
        weights=weights,
        shared=weights - experts - unread,
        experts=experts,
        expert_count=int(_first(config, "num_experts", "num_local_experts", "n_routed_experts")) if experts else 0,
        experts_per_token=int(_first(config, "num_experts_per_tok", "top_k")) if experts else 0,
        kv_of_window={window: layer * count for window, count in Counter(_windows(config)).items()},
    )


def _windows(config: Any) -> list[int | None]:
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None) or None
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _first(config: Any, *names: str) -> int:
    return next(int(getattr(config, name)) for name in names if getattr(config, name, None))


@torch.inference_mode()
def copy_bandwidth(device: str) -> float:
    """Return the bytes per second of a large copy on this device, reads and writes counted, the best of several."""
    size = _COPY_BYTES[device]
    if device == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(_REPEATS):
        settle(device)
        started = time.perf_counter()
        target.copy_(source)
        settle(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size / best


def settle(device: str) -> None:
    """Wait until the device has done all work that was launched."""
    if device == "cuda":
        torch.cuda.synchronize()

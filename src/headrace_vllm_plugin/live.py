"""Digests the weights that a worker really computes with, under canonical names, as far as vLLM's layout shows them.

Fused parameters are cut into views of their members. Weights that are packed (by oneDNN, for example) or sharded are
hidden: they are counted and never guessed, and only the canary checks them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from headrace.delivery.digest import digest
from headrace.delivery.digest_sums import MASK
from headrace_vllm_plugin.wire import Live


def compare(model: torch.nn.Module, staged: Mapping[str, torch.Tensor], *, whole: bool) -> Live:
    """Compare every staged tensor with its live counterpart by digest.

    `whole` says whether this worker holds the whole model; if not, all tensors count as hidden.
    """
    found = Live(hidden=len(staged))
    if not whole:
        return found
    with torch.no_grad():
        for name, view in visible(model, staged):
            live = digest([(name, view)])
            found.visible += 1
            found.hidden -= 1
            found.digest = (found.digest + live) & MASK
            if live != digest([(name, staged[name])]):
                found.wrong.append(name)
    return found


def visible(model: torch.nn.Module, staged: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield pairs of canonical name and live view, for the tensors whose layout is known."""
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    mapping: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, tensor in staged.items():
        view = _direct(live.get(name), tensor)
        if view is None:
            view = _member(name, live, mapping, staged)
        if view is not None and view.dtype == tensor.dtype and view.shape == tensor.shape:
            yield name, view


def _direct(parameter: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the parameter of that name, without padding rows; None if the parameter does not fit."""
    if parameter is None or parameter.dim() != tensor.dim() or not tensor.dim():
        return None
    return parameter.detach()[: tensor.shape[0]] if parameter.shape[0] >= tensor.shape[0] else None


def _member(
    name: str, live: Mapping[str, torch.Tensor], mapping: Mapping[str, list[str]], staged: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return the view of a member of a fused parameter: its rows follow the rows of the members before it."""
    parts = name.split(".")
    for fused, members in mapping.items():
        for place, part in enumerate(parts):
            if part not in members or part == fused:
                continue

            def sibling(member: str, place: int = place) -> str:
                return ".".join([*parts[:place], member, *parts[place + 1 :]])

            parameter = live.get(sibling(fused))
            siblings = [staged.get(sibling(member)) for member in members]
            if parameter is None or any(one is None for one in siblings):
                continue
            rows = [len(one) for one in siblings if one is not None]
            if parameter.dim() == 0 or len(parameter) != sum(rows):
                continue
            start = sum(rows[: members.index(part)])
            return parameter.detach()[start : start + rows[members.index(part)]]
    return None

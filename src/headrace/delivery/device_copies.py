"""Copies of many tensors on a GPU as one launch: recorded when first made or before, replayed from then on.

Enqueuing hundreds of tensors takes the host longer than the GPU copies them, and a GPU that runs out of work meanwhile
goes on with another process. What is replayed is found by the addresses that it copies between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from headrace.delivery.plan import all_on, copy_all

KEPT = 8
"""Recorded copies: between the few places that weights come to lie in, and those where they are used."""

_Tensors = Mapping[str, torch.Tensor]
_Key = tuple[int, tuple[int, ...], tuple[int, ...]]


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    runs: torch.Tensor
    """That the graph reads."""


class DeviceCopies:
    """Copies between tensors of one GPU. Used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A recording is made on a stream of its own: what others have under way is not part of it.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorded: dict[_Key, _Recorded] = {}
        self._next: tuple[_Tensors, _Tensors, torch.cuda.CUDAGraph] | None = None

    def copy(self, plan: int, targets: _Tensors, sources: _Tensors) -> None:
        """Copy every source over the target of its name, as `copy_all` does, on the current stream.

        `plan` is the digest of the plan that both follow: with their addresses it says all that a copy depends on.
        """
        graph = self._recording(plan, targets, sources)
        if graph is None:
            copy_all(targets, sources)
            return
        graph.replay()
        # A replay does not: who keeps something that was made of a tensor looks at its version.
        increment_version(targets.values())

    def prepare(self, plan: int, targets: _Tensors, sources: _Tensors) -> None:
        """Record the copy that is to be made next, unless it is recorded: that takes longer than the copy.

        Until then neither tensors nor their addresses may change.
        """
        graph = self._recording(plan, targets, sources)
        self._next = (targets, sources, graph) if graph is not None else None

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._recorded.clear()
        self._next = None

    def _recording(self, plan: int, targets: _Tensors, sources: _Tensors) -> torch.cuda.CUDAGraph | None:
        """The recorded copy; None for one that comes from elsewhere."""
        prepared, self._next = self._next, None
        if prepared is not None and prepared[0] is targets and prepared[1] is sources:
            return prepared[2]
        if not all_on(self._device, sources):
            return None
        key = plan, _addresses(targets, targets), _addresses(targets, sources)
        if key not in self._recorded:
            if len(self._recorded) >= KEPT:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = self._record(targets, sources)
        return self._recorded[key].graph

    def _record(self, targets: _Tensors, sources: _Tensors) -> _Recorded:
        # Late: only where there is a GPU is there a need for Triton.
        from headrace.delivery.kernels.copy import DeviceCopy

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            copy = DeviceCopy(targets, sources)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                copy.launch()
            finally:
                graph.capture_end()
        # Not the copy: it holds tensors, which may be gone when another lies at the same address.
        return _Recorded(graph, copy.runs)


def _addresses(names: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple([tensors[name].data_ptr() for name in names])

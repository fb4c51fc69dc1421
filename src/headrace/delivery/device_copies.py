"""Copies of many tensors on a GPU are recorded once as a CUDA graph and then replayed with one launch.

Enqueuing hundreds of copies takes the host longer than the GPU needs to run them, and a GPU that runs out of work
switches to another process meanwhile. A recording is looked up by the addresses that it copies between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from headrace.delivery.copying import all_on, copy_all

KEPT = 8
"""The number of recordings that are kept: one for each of the few places that new weights are copied from or to."""

_Tensors = Mapping[str, torch.Tensor]
_Key = tuple[int, tuple[int, ...], tuple[int, ...]]


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    runs: torch.Tensor
    """The table that the graph reads; it must live as long as the graph."""


class DeviceCopies:
    """Copies between tensors of one GPU. Used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Recordings are made on a separate stream, so that no other work becomes part of them.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorded: dict[_Key, _Recorded] = {}
        self._next: tuple[_Tensors, _Tensors, torch.cuda.CUDAGraph] | None = None

    def copy(self, plan: int, targets: _Tensors, sources: _Tensors) -> None:
        """Copy every source over the target of the same name, as `copy_all` does, on the current stream.

        `plan` is the digest of the plan of both sides. A copy depends only on this plan and on the addresses.
        """
        graph = self._recording(plan, targets, sources)
        if graph is None:
            copy_all(targets, sources)
            return
        graph.replay()
        # A replay does not do this. Code that caches values derived from a tensor checks the tensor's version counter.
        increment_version(targets.values())

    def prepare(self, plan: int, targets: _Tensors, sources: _Tensors) -> None:
        """Record the copy that will be made next, unless it is recorded already; recording takes longer than copying.

        Neither the tensors nor their addresses may change until that copy.
        """
        graph = self._recording(plan, targets, sources)
        self._next = (targets, sources, graph) if graph is not None else None

    def close(self) -> None:
        """Drop all recordings. Idempotent."""
        self._recorded.clear()
        self._next = None

    def _recording(self, plan: int, targets: _Tensors, sources: _Tensors) -> torch.cuda.CUDAGraph | None:
        """Return the recording of this copy; None if a source is not on this GPU."""
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
        # Imported here, because Triton is needed only with a GPU.
        from headrace.delivery.kernels.copy import DeviceCopy

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            copy = DeviceCopy(targets, sources)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                copy.launch()
            finally:
                graph.capture_end()
        # Keep only the table. The `DeviceCopy` would keep the tensors alive for as long as the recording.
        return _Recorded(graph, copy.runs)


def _addresses(names: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple([tensors[name].data_ptr() for name in names])

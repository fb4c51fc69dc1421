"""Copies of many tensors on a GPU as one launch: recorded when first made, replayed from then on.

Enqueuing hundreds of tensors takes the host longer than the GPU copies them, and a GPU that runs out of work meanwhile
goes on with another process. What is replayed is found by the addresses that it copies between.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.autograd.graph import increment_version

from headrace.delivery.plan import copy_all

KEPT = 8
"""Recorded copies: between the few places that weights come to lie in, and those where they are used."""

_Key = tuple[int, tuple[int, ...], tuple[int, ...]]


class DeviceCopies:
    """Copies between tensors of one GPU. Used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A recording is made on a stream of its own: what others have under way is not part of it.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorded: dict[_Key, torch.cuda.CUDAGraph] = {}

    def copy(self, plan: int, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        """Copy every source over the target of its name, as `copy_all` does, on the current stream.

        `plan` is the digest of the plan that both follow: with their addresses it says all that a copy depends on.
        """
        if any(tensor.device != self._device for tensor in sources.values()):
            copy_all(targets, sources)
            return
        key = plan, _addresses(targets, targets), _addresses(targets, sources)
        if key not in self._recorded:
            if len(self._recorded) >= KEPT:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = self._record(targets, sources)
        self._recorded[key].replay()
        # A replay does not: who keeps something that was made of a tensor looks at its version.
        for target in targets.values():
            increment_version(target)

    def close(self) -> None:
        """Forget everything. Idempotent."""
        self._recorded.clear()

    def _record(self, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                copy_all(targets, sources)
            finally:
                graph.capture_end()
        return graph


def _addresses(names: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensors[name].data_ptr() for name in names)

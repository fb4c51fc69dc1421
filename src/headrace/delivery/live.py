"""Checks of the live weights after an installation, and the order of a receiver's streams on a GPU.

On a GPU, the staging buffer is overwritten only after the last installation has read it, and the digest of the live
weights begins only after they were copied. Decoding waits for neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from headrace.delivery.copying import all_on, copy_all
from headrace.delivery.digest import digest
from headrace.delivery.plan import PackingPlan, dtype_of
from headrace.errors import DeliveryError

if TYPE_CHECKING:
    from headrace.delivery.kernels import DeviceDigest

SPIN_SECONDS = 1e-4
"""A wait polls without sleeping for this long, because a sleep takes longer than work that is almost done."""
GPU_SECONDS = 120.0
"""How long a copy or a digest may take on a GPU before the delivery fails."""
KEPT = 8
"""The number of recordings and of prepared digests that are kept: one for each of the few places of weights."""

_Tensors = Mapping[str, torch.Tensor]
_Key = tuple[int, tuple[int, ...], tuple[int, ...]]


class DeviceSide:
    """A receiver's streams on a GPU, and the events that keep them in order."""

    def __init__(self, device: torch.device) -> None:
        # Staging has priority over the kernels of decode steps, because new weights are urgent. Their proof is not.
        self._stage, self._digest = _stream(device, priority=-1), _stream(device)
        self._copies = DeviceCopies(device)
        self._copied: torch.cuda.Event | None = None
        self._prepared: dict[tuple[int, tuple[int, ...]], DeviceDigest] = {}
        self._live: DeviceDigest | None = None

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Run the block on the staging stream, after the last installation has read the buffer; wait for it at exit."""
        with torch.cuda.stream(self._stage):
            if self._copied is not None:
                self._stage.wait_event(self._copied)
            yield
            self.finish_staging()

    def finish_staging(self) -> None:
        """Wait for all work on the staging stream; raises `DeliveryError` after `GPU_SECONDS`."""
        _wait(self._stage.record_event(), "staging")

    def foresee(self, plan: PackingPlan, live: _Tensors, place: _Tensors) -> None:
        """Prepare the digest and the copy of later versions, which will be staged in this place."""
        self._prepare(plan, place)
        self._copies.prepare(plan.digest, live, place)

    def digest(self, plan: PackingPlan, weights: _Tensors) -> int:
        """Return the digest of these weights, which keep their addresses, after waiting for it.

        It is computed on the current stream of the GPU that holds the weights.
        """
        prepared = self._prepare(plan, weights)
        return prepared.value(prepared.launch())

    def digest_staged(self, plan: PackingPlan, live: _Tensors, staged: _Tensors) -> int:
        """Return the digest of the staged weights, after waiting for it.

        Meanwhile prepare the copy and the live digest of `install`, so that decoding does not wait for that. Weights
        that are not on this GPU are digested where they are.
        """
        if next(iter(staged.values())).device != self._stage.device:
            self.prepare_live(plan, live)
            return digest(staged.items())
        prepared = self._prepare(plan, staged)
        launched = prepared.launch()
        self._copies.prepare(plan.digest, live, staged)
        self.prepare_live(plan, live)
        return prepared.value(launched)

    def prepare_live(self, plan: PackingPlan, live: _Tensors) -> None:
        """Prepare the digest of the live weights, which `install` begins."""
        self._live = self._prepare(plan, live)

    def copy(self, plan: PackingPlan, live: _Tensors, staged: _Tensors) -> None:
        """Copy the staged weights, on a GPU or in host memory, over the live weights on the current stream.

        The call waits for the copy only if the staged weights are in host memory that is not pinned.
        """
        if next(iter(staged.values())).is_cuda:
            self._copies.copy(plan.digest, live, staged)
        else:
            copy_all(live, staged, non_blocking=all(tensor.is_pinned() for tensor in staged.values()))

    def await_copy(self) -> None:
        """Wait until the last installation has read the staging buffer, because the host is about to write to it."""
        if self._copied is not None:
            _wait(self._copied, "the copy of the last version")

    def install(
        self, copy: Callable[[], None], buffer: torch.Tensor | None, installed: Callable[[], None] | None
    ) -> tuple[Callable[[], bool], Callable[[], int], Callable[[], float]]:
        """Call `copy`, which writes the live weights on the current stream, then begin the live digest.

        `buffer` is the staging buffer, if the receiver has one. `installed` is called after the copy was enqueued.
        The returned functions are the last three fields of `receiver.Installed`. The second raises `DeliveryError` if
        the digest takes longer than `GPU_SECONDS`.
        """
        live_digest = self._live
        assert live_digest is not None
        stream = torch.cuda.current_stream(self._stage.device)
        began, ended = _timed_event(), _timed_event()
        began.record(stream)
        copy()
        if buffer is not None and buffer.is_cuda:
            buffer.record_stream(stream)
        self._copied = stream.record_event()
        if installed:
            installed()
        ended.record(stream)
        self._digest.wait_event(ended)
        with torch.cuda.stream(self._digest):
            result = live_digest.launch()
            digested = self._digest.record_event()

        def value() -> int:
            _wait(digested, "the digest of the live weights")
            with torch.cuda.stream(self._digest):
                return live_digest.value(result)

        return lambda: _done(digested), value, lambda: float(began.elapsed_time(ended)) / 1000

    def close(self) -> None:
        """Release the tensors. Idempotent."""
        self._prepared.clear()
        self._copies.close()
        self._live = None

    def _prepare(self, plan: PackingPlan, weights: _Tensors) -> DeviceDigest:
        """Return a digest of these tensors; it is prepared once for each place that holds weights."""
        from headrace.delivery.kernels import DeviceDigest

        key = (plan.digest, tuple([tensor.data_ptr() for tensor in weights.values()]))
        if key not in self._prepared:
            if len(self._prepared) >= KEPT:
                del self._prepared[next(iter(self._prepared))]
            dtypes = {entry.name: dtype_of(entry.dtype) for entry in plan.entries}
            self._prepared[key] = DeviceDigest(weights, dtypes)
        return self._prepared[key]


def _stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _done(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _wait(event: torch.cuda.Event, what: str) -> None:
    began = time.monotonic()
    while not _done(event):
        waited = time.monotonic() - began
        if waited > GPU_SECONDS:
            raise DeliveryError(f"the GPU has not finished {what} within {GPU_SECONDS:.0f} s")
        time.sleep(0.0 if waited < SPIN_SECONDS else 0.0002)


class DeviceCopies:
    """Copies between tensors of one GPU, recorded once as a CUDA graph and then replayed with one launch.

    Enqueuing hundreds of copies takes the host longer than the GPU needs to run them, and a GPU that runs out of work
    switches to another process meanwhile. A recording is looked up by the addresses that it copies between. Used by one
    thread at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Recordings are made on a separate stream, so that no other work becomes part of them.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._recorded: dict[_Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        """Recordings, each with the table that it reads, which must live as long as the recording."""
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
        return self._recorded[key][0]

    def _record(self, targets: _Tensors, sources: _Tensors) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        # Imported here, because Triton is needed only with a GPU.
        from headrace.delivery.kernels import DeviceCopy

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            copy = DeviceCopy(targets, sources)
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                copy.launch()
            finally:
                graph.capture_end()
        # Keep only the table. The `DeviceCopy` would keep the tensors alive for as long as the recording.
        return graph, copy.runs


def _addresses(names: _Tensors, tensors: _Tensors) -> tuple[int, ...]:
    return tuple([tensors[name].data_ptr() for name in names])

"""The live weights while they change: what a digest finds in them, and the order of a receiver's streams on a GPU.

On a GPU the staging buffer is written again only after the last installation has read it, and a digest of the live
weights begins only after they were copied; decoding waits for neither.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace.delivery.device_copies import DeviceCopies
from headrace.delivery.plan import PackingPlan, dtype_of
from headrace.errors import DeliveryError

if TYPE_CHECKING:
    from headrace.delivery.kernels.digest import DeviceDigest

PREPARED = 8
"""Digests that are kept ready: of the live weights, and of the few places that new ones are staged in."""
SPIN_SECONDS = 1e-4
"""What is all but done is waited for without sleep, which lasts longer."""
GPU_SECONDS = 120.0
"""How long a copy or a digest may take on a GPU before the delivery fails."""


@dataclass(frozen=True, eq=False)
class HostCheck:
    """The digest of live weights in host memory."""

    found: int
    started: float

    def ready(self) -> bool:
        """It was taken when the weights were installed."""
        return True

    def digest(self) -> int:
        """Of the live weights."""
        return self.found

    def seconds(self) -> float:
        """Since the installation began: nothing else runs until it is proved."""
        return time.monotonic() - self.started


@dataclass(frozen=True, eq=False)
class DeviceCheck:
    """A digest of live weights that a GPU takes beside other work."""

    stream: torch.cuda.Stream
    result: torch.Tensor
    digested: torch.cuda.Event
    copy_began: torch.cuda.Event
    copy_ended: torch.cuda.Event

    def ready(self) -> bool:
        """Whether it is done."""
        return _done(self.digested)

    def digest(self) -> int:
        """Of the live weights; waits for it."""
        from headrace.delivery.kernels.digest import DeviceDigest

        _wait(self.digested, "the digest of the live weights")
        with torch.cuda.stream(self.stream):
            return DeviceDigest.value(self.result)

    def seconds(self) -> float:
        """How long the engine's stream was kept busy. Call it after `digest`."""
        return float(self.copy_began.elapsed_time(self.copy_ended)) / 1000


class DeviceSide:
    """A receiver's streams on a GPU, and what keeps them in order."""

    def __init__(self, device: torch.device) -> None:
        # New weights are waited for: what stages them goes before the next kernels of steps. Their proof does not.
        self._stage, self._digest = _stream(device, priority=-1), _stream(device)
        self._copies = DeviceCopies(device)
        self._copied: torch.cuda.Event | None = None
        self._prepared: dict[tuple[int, tuple[int, ...]], DeviceDigest] = {}
        self._live: DeviceDigest | None = None

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Work on the stream for staging, once the last installation has read the buffer; it is done on return."""
        with torch.cuda.stream(self._stage):
            if self._copied is not None:
                self._stage.wait_event(self._copied)
            yield
            self.finish_staging()

    def finish_staging(self) -> None:
        """Wait for what was put on the stream for staging."""
        _wait(self._stage.record_event(), "staging")

    def begin_digest(self, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> Callable[[], int]:
        """Begin the digest of what is staged; the call waits for it."""
        prepared = self._prepare(plan, weights)
        launched = prepared.launch()
        return lambda: prepared.value(launched)

    def foresee(self, plan: PackingPlan, live: Mapping[str, torch.Tensor], place: Mapping[str, torch.Tensor]) -> None:
        """Make ready what a later version takes, which will be staged in this place: its digest, and its copy."""
        self._prepare(plan, place)
        self._copies.prepare(plan.digest, live, place)

    def prepare_install(
        self, plan: PackingPlan, live: Mapping[str, torch.Tensor], staged: Mapping[str, torch.Tensor]
    ) -> None:
        """Make ready what `install` takes, so that decoding does not wait for it: the copy, and the live digest."""
        self._copies.prepare(plan.digest, live, staged)
        self._live = self._prepare(plan, live)

    def install(
        self,
        plan: PackingPlan,
        live: Mapping[str, torch.Tensor],
        staged: Mapping[str, torch.Tensor],
        buffer: torch.Tensor | None,
        installed: Callable[[], None] | None,
    ) -> DeviceCheck:
        """Copy what is staged, in the buffer if there is one, on the current stream; begin the digest once it is."""
        stream = torch.cuda.current_stream(self._stage.device)
        began, ended = _timed_event(), _timed_event()
        began.record(stream)
        self._copies.copy(plan.digest, live, staged)
        if buffer is not None:
            buffer.record_stream(stream)
        self._copied = stream.record_event()
        if installed:
            installed()
        ended.record(stream)
        self._digest.wait_event(ended)
        with torch.cuda.stream(self._digest):
            assert self._live is not None
            result = self._live.launch()
            return DeviceCheck(self._digest, result, self._digest.record_event(), began, ended)

    def close(self) -> None:
        """Let go of the tensors. Idempotent."""
        self._prepared.clear()
        self._copies.close()
        self._live = None

    def _prepare(self, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> DeviceDigest:
        """A digest of these tensors, made once for each place that weights come to lie in."""
        from headrace.delivery.kernels.digest import DeviceDigest

        key = (plan.digest, tuple([tensor.data_ptr() for tensor in weights.values()]))
        if key not in self._prepared:
            if len(self._prepared) >= PREPARED:
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

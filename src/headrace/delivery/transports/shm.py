"""Weights through shared memory on one host: two segments, written in turn, each reused only once it is released.

The trainer never writes a segment that an engine may still read, and an engine checks that against the segment's header
before and after its copy. Locations are the segments' paths.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from headrace.delivery.base import Entry
from headrace.delivery.plan import Plan, unpack
from headrace.delivery.transports.segments import HEADER_BYTES, MappedSegment, Segment, sweep
from headrace.errors import DeliveryError

__all__ = ["ShmSender", "ShmSource", "sweep"]


class _Held(msgspec.Struct):
    """Who holds a segment, and since when."""

    version: int
    since: float


class ShmSender:
    """The trainer's end: owns the segments."""

    name = "shm"
    SEGMENTS = 2

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._segments: dict[str, Segment] = {}
        self._held: dict[str, _Held] = {}
        self._changed = threading.Condition()
        self._closed = False

    def wait(self, version: int, timeout: float) -> None:
        """Wait for a free segment; see `Sender.wait`."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout) or self._closed:
                raise self._refusal(version)

    def write(self, version: int, plan: Plan, weights: Mapping[str, torch.Tensor]) -> str:
        """Copy the weights into a free segment; see `Sender.write`."""
        segment = self._take(version, plan.nbytes)
        location = str(segment.path)
        written = False
        try:
            segment.begin(version)
            with torch.no_grad():
                for name, target in unpack(_payload(segment.buffer), plan.entries).items():
                    if target.shape != weights[name].shape:
                        raise DeliveryError(f"{name} has shape {tuple(weights[name].shape)}, not {tuple(target.shape)}")
                    target.copy_(weights[name])
            segment.finish(version)
            written = True
        finally:
            if not written:
                self.release(location)
        return location

    def snapshot(self, location: str, plan: Plan) -> dict[str, torch.Tensor]:
        """Views of a segment that was written and not released."""
        with self._changed:
            if location not in self._held:
                raise DeliveryError(f"segment {location} holds nothing")
            return unpack(_payload(self._segments[location].buffer), plan.entries)

    def release(self, location: str) -> None:
        """The segment may be written again."""
        with self._changed:
            self._held.pop(location, None)
            self._changed.notify_all()

    def close(self) -> None:
        """Remove the segments; a `write` that waits raises."""
        with self._changed:
            self._closed = True
            segments, self._segments = self._segments, {}
            self._held.clear()
            self._changed.notify_all()
        for segment in segments.values():
            segment.remove()

    def _take(self, version: int, nbytes: int) -> Segment:
        with self._changed:
            if self._closed or not self._has_room():
                raise self._refusal(version)
            segment = self._free_segment(nbytes)
            self._held[str(segment.path)] = _Held(version, time.monotonic())
            return segment

    def _has_room(self) -> bool:
        return self._closed or len(self._held) < self.SEGMENTS

    def _refusal(self, version: int) -> DeliveryError:
        if self._closed:
            return DeliveryError(f"no segment for version {version}: the transport is closed")
        now = time.monotonic()
        holders = " and ".join(f"version {held.version} ({now - held.since:.1f} s)" for held in self._held.values())
        return DeliveryError(f"no segment for version {version}: not acknowledged by the engines: {holders}")

    def _free_segment(self, nbytes: int) -> Segment:
        for location in [location for location in self._segments if location not in self._held]:
            if self._segments[location].nbytes == nbytes:
                return self._segments[location]
            # Never resized: a reader may have it mapped, and would die of reading past its end.
            self._segments.pop(location).remove()
        segment = Segment.create(self._run_id, nbytes)
        self._segments[str(segment.path)] = segment
        return segment


class ShmSource:
    """An engine's end: maps each segment once."""

    def __init__(self) -> None:
        self._mapped: dict[str, MappedSegment] = {}

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Views of the segment; see `Source.open`."""
        if location not in self._mapped:
            self._drop([old for old, segment in self._mapped.items() if segment.removed])
            self._mapped[location] = MappedSegment(Path(location))
        segment = self._mapped[location]
        try:
            segment.check(version, max(entry.offset + entry.nbytes for entry in entries))
        except DeliveryError:
            self._drop([location])
            raise
        return unpack(_payload(segment.buffer), entries)

    def verify(self, location: str, version: int) -> None:
        """Check the segment's header again."""
        self._mapped[location].check(version)

    def close(self) -> None:
        """Unmap everything."""
        self._drop(list(self._mapped))

    def _drop(self, locations: list[str]) -> None:
        for location in locations:
            self._mapped.pop(location).close()


def _payload(buffer: object) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8, offset=HEADER_BYTES)

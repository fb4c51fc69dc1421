"""The `shm` transport: two shared-memory segments of one host, written in turn; each is reused only after its release.

The trainer never writes to a segment that an engine may still read. An engine checks this with the segment's header,
before and after its copy. A location is the path of a segment.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from headrace.delivery.base import Entry
from headrace.delivery.copying import copy_all
from headrace.delivery.plan import PackingPlan, Views, packed_bytes
from headrace.delivery.transports.base import PlacedSender, Sender, SenderSettings, Source, SourceSettings
from headrace.delivery.transports.segments import HEADER_BYTES, MappedSegment, SegmentSource, SharedSegment


class ShmSender(PlacedSender):
    """The trainer's end, which owns the segments."""

    name = "shm"

    def __init__(self, run_id: str) -> None:
        super().__init__("segment")
        self._run_id = run_id
        self._segments: dict[str, SharedSegment] = {}
        self._memory: dict[str, Views] = {}

    def close(self) -> None:
        """Remove the segments; a `wait` that is under way raises `DeliveryError`."""
        super().close()
        # The views go first, because a mapping lasts as long as its last view.
        self._memory.clear()
        segments, self._segments = self._segments, {}
        for segment in segments.values():
            segment.remove()

    def _fill(self, location: str, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        segment = self._segments[location]
        segment.begin(version)
        copy_all(self._memory[location].of(plan.entries), weights)
        segment.finish(version)

    def _views(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        return self._memory[location].of(plan.entries)

    def _choose(self, version: int, nbytes: int, held: Collection[str]) -> str:
        for location in [location for location in self._segments if location not in held]:
            if self._segments[location].nbytes == nbytes:
                return location
            # A segment is never resized: a reader that has it mapped would be killed when it reads past the end.
            del self._memory[location]
            self._segments.pop(location).remove()
        segment = SharedSegment.create(self._run_id, nbytes)
        self._segments[str(segment.path)] = segment
        self._memory[str(segment.path)] = Views(_payload(segment.buffer))
        return str(segment.path)


class _Mapped(MappedSegment):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.views = Views(_payload(self.buffer))

    def close(self) -> None:
        # The views go first, because a mapping lasts as long as its last view.
        del self.views
        super().close()


class ShmSource(SegmentSource[_Mapped]):
    """An engine's end, which maps each segment once."""

    def __init__(self) -> None:
        super().__init__(_Mapped)

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Return views of the segment; see `Source.open`."""
        return self._opened(location, version, packed_bytes(entries)).views.of(entries)


def _payload(buffer: object) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8, offset=HEADER_BYTES)


class Transport:
    """The `shm` transport: shared memory of one host."""

    crosses_hosts = False

    def sender(self, settings: SenderSettings) -> Sender:
        """See `base.Transport.sender`."""
        return ShmSender(settings.run_id)

    def source(self, settings: SourceSettings) -> Source:
        """See `base.Transport.source`."""
        return ShmSource()

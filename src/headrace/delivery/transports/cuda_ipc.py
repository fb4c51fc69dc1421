"""The `cuda_ipc` transport: the trainer owns two buffers on its GPU; every engine of the host maps them and copies out.

Each buffer has a small shared-memory segment. The segment's header says which version the buffer holds, and its payload
says how to map the buffer. An event that all processes share orders the work on the GPU. A reader checks the header
before and after its copy, so a buffer that was overwritten meanwhile is noticed. A location is the path of a segment,
so the segments of a killed trainer are swept like any others.

A buffer that engines may have mapped is not freed before the end, so it is used for every size up to its own (a delta
goes into a buffer that held all weights). Both buffers exist from the first version on, and each segment names the
other one. An engine maps both before it serves, because mapping takes longer than decoding should be stopped.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
import torch

from headrace.delivery.base import Entry
from headrace.delivery.device_copies import DeviceCopies
from headrace.delivery.plan import PackingPlan, Views, packed_bytes
from headrace.delivery.transports.base import Sender, SenderSettings, Source, SourceSettings
from headrace.delivery.transports.cuda_memory import allocate, open_handle
from headrace.delivery.transports.places import LIMIT, PlacedSender
from headrace.delivery.transports.segments import HEADER_BYTES, MappedSegment, SegmentSource, SharedSegment
from headrace.errors import ConfigError, DeliveryError

TICKET_BYTES = 2048


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """The payload of a segment: how to map its buffer."""

    token: str
    """An id of the buffer. A process cannot map its own memory, so it recognises its own buffers by this id."""
    gpu: str
    """The GPU's UUID, because the GPU may have another index in another process."""
    nbytes: int
    memory: bytes
    event: bytes
    others: list[str] = []
    """The locations of the trainer's other buffers, which will hold later versions."""


class _Place:
    """One buffer of this process: its segment, its memory, and an event that is recorded after each write."""

    def __init__(self, run_id: str, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.memory, handle = allocate(nbytes, device)
        with torch.cuda.device(device):
            self.written: torch.cuda.Event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            event = self.written.ipc_handle()  # type: ignore[no-untyped-call]
        self.token = uuid.uuid4().hex
        self._ticket = Ticket(token=self.token, gpu=_uuid(device.index), nbytes=nbytes, memory=handle, event=event)
        self.segment = SharedSegment.create(run_id, TICKET_BYTES)
        self.views = Views(self.memory)
        _own[self.token] = self

    def announce(self, places: Collection[str]) -> None:
        """Write into the segment how to map this buffer, and the locations of the other places."""
        others = [place for place in places if place != str(self.segment.path)]
        write_ticket(self.segment, msgspec.structs.replace(self._ticket, others=others))


_own: WeakValueDictionary[str, _Place] = WeakValueDictionary()


class CudaIpcSender(PlacedSender):
    """The trainer's end, which owns the buffers. Readers of a buffer wait for its event, so `finish` does nothing."""

    name = "cuda_ipc"

    def __init__(self, run_id: str, *, device: torch.device | str = "cuda") -> None:
        """Create a sender; `device` is the GPU with the trainer's weights."""
        super().__init__("buffer")
        self._device = _gpu(device, "trainer")
        self._run_id = run_id
        self._held: dict[str, _Place] = {}
        self._outgrown: list[_Place] = []
        """Buffers that became too small. They are kept: to free memory that another process has mapped is undefined."""
        self._copies = DeviceCopies(self._device)

    def write(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> str:
        """Enqueue a copy into a free buffer on the current stream; see `Sender.write`.

        Later changes that the caller makes to its weights on this stream run after the copy.
        """
        with self._places.filling(version, partial(self._free, plan.nbytes), self.release) as location:
            place = self._held[location]
            place.segment.begin(version)
            with torch.cuda.device(self._device), torch.no_grad():
                self._copies.copy(plan.digest, place.views.of(plan.entries), weights)
                place.written.record(torch.cuda.current_stream(self._device))
            place.segment.finish(version)
        return location

    def follow(self, location: str) -> None:
        """Make the current stream wait until the buffer is written."""
        self._holding(location)

    def snapshot(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return views of the buffer, and make the current stream wait until it is written."""
        return self._holding(location).views.of(plan.entries)

    def close(self) -> None:
        """Remove the segments; the GPU memory is freed with the last view of it."""
        self._places.close()
        self._copies.close()
        places, self._held = self._held, {}
        for place in places.values():
            place.segment.remove()
        self._outgrown.clear()

    def _holding(self, location: str) -> _Place:
        place = self._held.get(location)
        if place is None or not self._places.holds(location):
            raise DeliveryError(f"buffer {location} holds nothing")
        torch.cuda.current_stream(self._device).wait_event(place.written)
        return place

    def _free(self, nbytes: int, held: Collection[str]) -> str:
        for location in [location for location in self._held if location not in held]:
            if self._held[location].nbytes >= nbytes:
                return location
            self._outgrown.append(self._held.pop(location))
            self._outgrown[-1].segment.remove()
        largest = max((place.nbytes for place in self._held.values()), default=0)
        new: list[_Place] = []
        while len(self._held) < LIMIT:
            new.append(_Place(self._run_id, max(nbytes, largest), self._device))
            self._held[str(new[-1].segment.path)] = new[-1]
            # Announced inside the loop: if memory is short, the next buffer fails and this one is still usable.
            for place in new:
                place.announce(self._held)
        return str(new[0].segment.path)


class _Mapped(MappedSegment):
    """A buffer of the trainer, mapped into this process, with its segment."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        opened = False
        try:
            ticket = read_ticket(self)
            self.others = ticket.others
            own = _own.get(ticket.token)
            if own is not None:
                self.memory, self.written = own.memory, own.written
            else:
                self._map(ticket)
            self.views = Views(self.memory)
            opened = True
        finally:
            if not opened:
                self.close()

    def _map(self, ticket: Ticket) -> None:
        self._check_owner()
        device = torch.device("cuda", _index_of(ticket.gpu))
        self.memory = open_handle(ticket.memory, ticket.nbytes, device)
        try:
            self.written = torch.cuda.Event.from_ipc_handle(device, ticket.event)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise DeliveryError(f"the event of buffer {self.path.name} cannot be opened: {reason}") from error

    def check(self, version: int, nbytes: int = 0) -> None:
        """Raise `DeliveryError` unless the owner is alive and the buffer holds exactly this version, complete."""
        super().check(version)
        self._check_owner()
        if len(self.memory) < nbytes:
            raise DeliveryError(f"buffer {self.path.name} has {len(self.memory)} bytes, not {nbytes}")

    def _check_owner(self) -> None:
        if self.abandoned:
            raise DeliveryError(f"the owner of buffer {self.path.name} is dead, and its memory with it")


class CudaIpcSource(SegmentSource[_Mapped]):
    """An engine's end, which maps each buffer once."""

    def __init__(self, *, device: torch.device | str = "cuda") -> None:
        """Create a source; `device` is the GPU with the engine's weights. The trainer's GPU may be another one."""
        super().__init__(_Mapped)
        _gpu(device, "engine")
        self._upcoming: list[_Mapped] = []

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Return views of the buffer, and make the current stream wait until it is written. See `Source.open`."""
        mapped = self._opened(location, version, packed_bytes(entries))
        torch.cuda.current_stream(mapped.memory.device).wait_event(mapped.written)
        return mapped.views.of(entries)

    def upcoming(self, entries: Sequence[Entry]) -> list[dict[str, torch.Tensor]]:
        """Return views of the other buffers; see `PredictsPlaces.upcoming`."""
        nbytes = packed_bytes(entries)
        found = [mapped.views.of(entries) for mapped in self._upcoming if len(mapped.memory) >= nbytes]
        self._upcoming.clear()
        return found

    def close(self) -> None:
        """Unmap everything."""
        super().close()
        self._upcoming.clear()

    def _map(self, location: str) -> _Mapped:
        mapped = super()._map(location)
        for other in mapped.others:
            # A buffer that is gone was replaced by a larger one.
            with suppress(DeliveryError):
                if other not in self._mapped:
                    self._upcoming.append(super()._map(other))
        return mapped


def write_ticket(segment: SharedSegment, ticket: Ticket) -> None:
    """Write the ticket into the segment's payload."""
    text = msgspec.json.encode(ticket)
    if len(text) > TICKET_BYTES:
        raise DeliveryError(f"a ticket has at most {TICKET_BYTES} bytes, not {len(text)}")
    segment.buffer[HEADER_BYTES : HEADER_BYTES + TICKET_BYTES] = text.ljust(TICKET_BYTES)


def read_ticket(segment: MappedSegment) -> Ticket:
    """Return the ticket in the segment's payload; raises `DeliveryError` if there is none."""
    try:
        return msgspec.json.decode(segment.buffer[HEADER_BYTES : HEADER_BYTES + TICKET_BYTES], type=Ticket)
    except msgspec.DecodeError as error:
        raise DeliveryError(f"segment {segment.path.name} does not say how to map a GPU's memory") from error


def _gpu(device: torch.device | str, whose: str) -> torch.device:
    wanted = torch.device(device)
    if wanted.type != "cuda":
        raise ConfigError(f'[delivery] transport: "cuda_ipc" needs the {whose}\'s weights on a GPU, not on {wanted}')
    if not torch.cuda.is_available():
        raise ConfigError('[delivery] transport: "cuda_ipc" needs a GPU, and this machine has none')
    return wanted if wanted.index is not None else torch.device("cuda", torch.cuda.current_device())


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(gpu: str) -> int:
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == gpu:
            return index
    raise DeliveryError(f"the weights are on GPU {gpu}, which this process does not see (CUDA_VISIBLE_DEVICES)")


class Transport:
    """The `cuda_ipc` transport: GPU memory that the processes of one host share."""

    needs_gpu = True
    on_device = True
    crosses_hosts = False
    for_servers = False

    def sender(self, settings: SenderSettings) -> Sender:
        """See `base.Transport.sender`."""
        return CudaIpcSender(settings.run_id, device=settings.device)

    def source(self, settings: SourceSettings) -> Source:
        """See `base.Transport.source`."""
        return CudaIpcSource(device=settings.device)

"""The `cuda_ipc` transport: the trainer owns two buffers on its GPU; every engine of the host maps them and copies out.

Each buffer has a small shared-memory segment. The segment's header says which version the buffer holds, and its payload
says how to map the buffer. An event that all processes share orders the work on the GPU. A reader checks the header
before and after its copy, so a buffer that was overwritten meanwhile is noticed. A location is the path of a segment,
so the segments of a killed trainer are swept like any others.

A buffer that engines may have mapped is not freed before the end, so it is used for every size up to its own (a delta
goes into a buffer that held all weights). Both buffers exist from the first version on, and each segment names the
other one. An engine maps both before it serves, because mapping takes longer than decoding should be stopped.
"""

import ctypes
import functools
import uuid
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import torch

from headrace.delivery.base import Entry
from headrace.delivery.live import DeviceCopies
from headrace.delivery.plan import PackingPlan, Views, packed_bytes
from headrace.delivery.transports.base import LIMIT, PlacedSender, Sender, SenderSettings, Source, SourceSettings
from headrace.delivery.transports.segments import HEADER_BYTES, MappedSegment, SegmentSource, SharedSegment
from headrace.errors import ConfigError, DeliveryError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2


class _Handle(ctypes.Structure):
    """The driver's CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


_Pointer = ctypes.c_uint64
_SIGNATURES: dict[str, list[Any]] = {
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemAlloc_v2": [ctypes.POINTER(_Pointer), ctypes.c_size_t],
    "cuMemFree_v2": [_Pointer],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _Pointer],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_Pointer), _Handle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_Pointer],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class DriverError(DeliveryError):
    """A call of the CUDA driver failed."""

    def __init__(self, what: str, code: int) -> None:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        super().__init__(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {code})")
        self.code = code


def allocate(nbytes: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """Allocate bytes on this GPU; return them with the handle by which another process maps them."""
    with _context(device):
        pointer = _Pointer()
        try:
            _call("cuMemAlloc_v2", f"{nbytes / 2**20:.0f} MiB on {device}", ctypes.byref(pointer), nbytes)
        except DriverError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            # Free the memory that torch caches, then try again.
            torch.cuda.empty_cache()
            _call("cuMemAlloc_v2", f"{nbytes / 2**20:.0f} MiB on {device}", ctypes.byref(pointer), nbytes)
        memory = _tensor(pointer.value, nbytes, device, "cuMemFree_v2")
        handle = _Handle()
        _call("cuIpcGetMemHandle", "sharing GPU memory", ctypes.byref(handle), pointer)
        return memory, bytes(handle)


def open_handle(handle: bytes, nbytes: int, device: torch.device) -> torch.Tensor:
    """Map another process's bytes on this GPU. Raises `DeliveryError` if that process is gone."""
    if len(handle) != HANDLE_BYTES:
        raise DeliveryError(f"a handle of GPU memory has {HANDLE_BYTES} bytes, not {len(handle)}")
    with _context(device):
        pointer = _Pointer()
        passed = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", "opening shared GPU memory", ctypes.byref(pointer), passed, _LAZY_PEER_ACCESS)
        return _tensor(pointer.value, nbytes, device, "cuIpcCloseMemHandle")


class _Region:
    """A range of GPU addresses in the form from which torch makes a tensor."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _tensor(pointer: int, nbytes: int, device: torch.device, end: str) -> torch.Tensor:
    region = _Region(pointer, nbytes)
    weakref.finalize(region, _end, end, pointer, device).atexit = False
    memory = torch.as_tensor(region, device=device)
    if memory.data_ptr() != pointer:
        raise DeliveryError(f"torch copied shared memory of {device} instead of looking at it")
    return memory


def _end(function: str, pointer: int, device: torch.device) -> None:
    with suppress(DriverError), _context(device):  # a driver that is shutting down has freed it already
        _call(function, "ending shared GPU memory", pointer)


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Make the CUDA context that torch uses on this GPU current in this thread."""
    _call("cuCtxPushCurrent_v2", f"using {device}", _primary(device.index))
    try:
        yield
    finally:
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _primary(index: int) -> int:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", f"GPU {index}", ctypes.byref(ordinal), index)
    _call("cuDevicePrimaryCtxRetain", f"GPU {index}", ctypes.byref(context), ordinal.value)
    assert context.value is not None
    return context.value


def _call(function: str, what: str, *arguments: Any) -> None:
    if code := getattr(_driver(), function)(*arguments):
        raise DriverError(what, code)


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeliveryError("there is no CUDA driver on this machine") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return driver


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

    def follow(self, location: str) -> None:
        """Make the current stream wait until the buffer is written."""
        self._check_held(location)
        torch.cuda.current_stream(self._device).wait_event(self._held[location].written)

    def close(self) -> None:
        """Remove the segments; the GPU memory is freed with the last view of it."""
        super().close()
        self._copies.close()
        places, self._held = self._held, {}
        for place in places.values():
            place.segment.remove()
        self._outgrown.clear()

    def _fill(self, location: str, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        place = self._held[location]
        place.segment.begin(version)
        with torch.cuda.device(self._device), torch.no_grad():
            self._copies.copy(plan.digest, place.views.of(plan.entries), weights)
            place.written.record(torch.cuda.current_stream(self._device))
        place.segment.finish(version)

    def _views(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        self.follow(location)
        return self._held[location].views.of(plan.entries)

    def _choose(self, version: int, nbytes: int, held: Collection[str]) -> str:
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

    def sender(self, settings: SenderSettings) -> Sender:
        """See `base.Transport.sender`."""
        return CudaIpcSender(settings.run_id, device=settings.device)

    def source(self, settings: SourceSettings) -> Source:
        """See `base.Transport.source`."""
        return CudaIpcSource(device=settings.device)

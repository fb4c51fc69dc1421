"""An engine's end of the `nccl` transport, and what both ends share: messages in a key-value store, and a communicator.

A write is one version in one place (a buffer of the sender). Every request names its write, and the pieces of a
broadcast follow from the plan alone, so no engine mixes two writes or receives pieces in a wrong order. Every step has
a deadline. The default process group is not touched. A call that may block inside a library runs in a thread of its own
(also a call to the store, whose host may be cut off). A thread without progress is abandoned; the communicator, the
connection and the memory that it was given must then not be used again.

An engine asks for a version, joins the group that the sender forms, and receives. The received bytes count only if the
place still holds the same write afterwards. After any failure, the group, the connection to the sender and the memory
are discarded, so a late broadcast cannot change memory that is in use.
"""

import contextlib
import os
import re
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from headrace.delivery.base import Entry
from headrace.delivery.plan import packed_bytes, unpack
from headrace.delivery.transports.collectives import own_address, use_interface
from headrace.errors import DeliveryError

BUCKET_BYTES = 64 << 20
"""The bytes of one broadcast call."""
WINDOW = 2
"""The number of broadcasts in flight: the next is enqueued before the previous one is done."""
POLL_SECONDS = 0.001
"""The pause between two looks into the store."""
_WORK_POLL_SECONDS = 0.0002
_LOCATION = re.compile(r"(nccl|gloo)://([0-9.]+):(\d+)/(\d+)")
_GRACE_SECONDS = 1.0
_ABORT_SECONDS = 5.0
_SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_environment = threading.Lock()

T = TypeVar("T")


class HeldVersion(msgspec.Struct, frozen=True, array_like=True):
    """The version that a place holds, as kept in the store."""

    version: int = -1
    sequence: int = 0
    """The number of the write that filled the place."""
    nbytes: int = 0
    whole: bool = False
    """Whether the version is completely written and not released."""


class BroadcastRequest(msgspec.Struct, frozen=True, array_like=True):
    """An engine's request for a version. The reply has the number of the request."""

    receiver: str
    place: int
    version: int
    sequence: int
    group: str
    """The key of the group that the engine is still in, or an empty string."""


class BroadcastReply(msgspec.Struct, frozen=True, array_like=True):
    """The broadcast that an engine must join, or a refusal."""

    session: int = 0
    group: str = ""
    """The key of the group. The engine forms this group unless it is still in it."""
    rank: int = 0
    size: int = 0
    bucket_bytes: int = 0
    """The bytes of one broadcast call; 0 means tensor by tensor."""
    refusal: str = ""


class NcclLocation(msgspec.Struct, frozen=True):
    """A place of a sender, and the backend that broadcasts its bytes."""

    backend: str
    host: str
    port: int
    place: int

    def __str__(self) -> str:
        return f"{self.backend}://{self.host}:{self.port}/{self.place}"


def parse_location(text: str) -> NcclLocation:
    """Parse the location in a manifest. The host is not checked here: the sender checked the address it listens on."""
    match = _LOCATION.fullmatch(text)
    if match is None:
        raise DeliveryError(f"{text!r} is not a location of the nccl transport")
    return NcclLocation(match[1], match[2], int(match[3]), int(match[4]))


def key(*parts: str | int) -> str:
    """Return a key of the store through which the two ends speak.

    `asks` counts requests, and numbers begin with 1. A request is at `ask/NUMBER`, and its reply at `answer/NUMBER`.
    `held/PLACE` is the version that a place holds. A member says at `joined/SESSION/RANK` that it has joined, and the
    sender says `yes` at `begin/SESSION` when all members joined, or else what is missing.
    """
    return "/".join(map(str, parts))


def pieces(entries: Sequence[Entry], bucket_bytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges to broadcast, in order: buckets of the packed bytes, or tensors if `bucket_bytes` is 0."""
    if bucket_bytes:
        nbytes = packed_bytes(entries)
        return [(start, min(nbytes, start + bucket_bytes)) for start in range(0, nbytes, bucket_bytes)]
    return [(entry.offset, entry.offset + entry.nbytes) for entry in entries if entry.nbytes]


class ProgressWatch:
    """Watches that work makes progress: it knows the time of the last progress and the longest allowed pause."""

    def __init__(self, patience: float, what: str) -> None:
        self._patience = patience
        self._what = what
        self._last = time.monotonic()

    def made(self) -> None:
        """Record that there was progress. Raise `DeliveryError` if it came so late that `bounded` has given up."""
        self.check(_GRACE_SECONDS)
        self._last = time.monotonic()

    def left(self) -> float:
        """Return the seconds until the next progress is due."""
        return self._last + self._patience - time.monotonic()

    def check(self, grace: float = 0.0) -> None:
        """Raise `DeliveryError` if the last progress was too long ago; `grace` seconds are allowed on top."""
        if self.left() < -grace:
            raise DeliveryError(f"{self._what}: nothing happened for {self._patience:g} s")


def bounded(work: Callable[[], T], progress: ProgressWatch) -> T:
    """Run `work` in a thread; return or raise its outcome. Without progress, abandon it and raise `DeliveryError`."""

    def run(outcome: Future[T]) -> None:
        try:
            outcome.set_result(work())
        except (RuntimeError, ValueError, DeliveryError) as error:
            outcome.set_exception(error)
        finally:
            del outcome

    outcome: Future[T] = Future()
    threading.Thread(target=run, args=(outcome,), name="broadcast", daemon=True).start()
    try:
        while not wait([outcome], max(0.0, progress.left() + _GRACE_SECONDS)).done:
            # `work` checks the deadline too, unless it hangs in a library.
            progress.check(_GRACE_SECONDS)
        return outcome.result()
    finally:
        # An error refers to this frame, the frame to the future, and the future to the error. This cycle would keep the
        # connection that `work` used open.
        del outcome


def connect(host: str, port: int, patience: float) -> TCPStore:
    """Connect to the sender's store. Raises `DeliveryError` at once if nobody listens there."""

    def dial() -> TCPStore:
        try:
            # Tried with a plain socket first, because the store's own client would retry until its deadline.
            socket.create_connection((host, port), timeout=patience).close()
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=patience))
        except (OSError, dist.DistError) as error:
            raise DeliveryError(f"the sender at {host}:{port} is gone") from error

    return bounded(dial, ProgressWatch(patience, f"connecting to {host}:{port}"))


def exact(device: torch.device | str) -> torch.device:
    """Return the device with its index, because `cuda` without an index can mean another GPU in another thread."""
    wanted = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(wanted) == "cuda" else wanted


class BroadcastGroup:
    """The members of a broadcast; rank 0 sends. Used by one thread at a time, and not usable after an exception."""

    def __init__(
        self,
        key: str,
        backend: str,
        address: tuple[str, int],
        rank: int,
        size: int,
        device: torch.device,
        patience: float,
    ) -> None:
        """Form the group; all members must do so within `patience` seconds."""
        self.key = key
        self._device = device
        self._patience = patience
        progress = ProgressWatch(patience, f"forming a group of {size}")

        def form() -> Any:
            with on_device(device, None):
                # A separate connection, so that one that hangs does not block others.
                store = PrefixStore(key, connect(*address, patience))
                return _communicator(backend, store, rank, size, own_address(*address), patience)

        self._communicator = bounded(form, progress)

    def broadcast(self, session: int, packed: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> None:
        """Send the pieces of the packed bytes, or receive them in place; all is done on return.

        All members must pass the same session. On a GPU the broadcast runs after the work on the current stream.
        """
        progress = ProgressWatch(self._patience, f"broadcast {session}")
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run() -> None:
            with on_device(self._device, stream):
                self._greet(session, progress)
                under_way: deque[Any] = deque()
                for start, stop in pieces:
                    if len(under_way) == WINDOW:
                        _finish(under_way.popleft(), progress)
                    under_way.append(self._communicator.broadcast(packed[start:stop], 0))
                for work in under_way:
                    _finish(work, progress)

        bounded(run, progress)

    def abort(self) -> None:
        """End the group, whatever the other members do."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with contextlib.suppress(DeliveryError, RuntimeError):
                bounded(communicator.abort, ProgressWatch(_ABORT_SECONDS, "ending a group"))

    def _greet(self, session: int, progress: ProgressWatch) -> None:
        """Broadcast the session's number first: this connects all members, and fails if one of them is lost."""
        number = torch.tensor([session], dtype=torch.int64, device=self._device)
        _finish(self._communicator.broadcast(number, 0), progress)
        if (said := int(number.item())) != session:
            raise DeliveryError(f"the sender is at broadcast {said}, not {session}")


def _finish(work: Any, progress: ProgressWatch) -> None:
    while not work.is_completed():
        progress.check()
        time.sleep(_WORK_POLL_SECONDS)
    work.wait()
    progress.made()


def _communicator(backend: str, store: Store, rank: int, size: int, own: str, patience: float) -> Any:
    """Make this member's end, which uses the interface of the address `own` only."""
    api: Any = dist
    if backend == "gloo":
        options = api.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=patience)
        options._devices = [api.ProcessGroupGloo.create_device(hostname=own)]
        return api.ProcessGroupGloo(store, rank, size, options)
    use_interface(own)
    options = api.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=patience)
    with _errors_are_raised():
        return api.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _errors_are_raised() -> Iterator[None]:
    """Set NCCL options under which errors are raised, while a communicator is made.

    By default, a communicator that loses a member ends the process; it must not end a trainer or an engine. The
    environment is read when a communicator is made, so it is restored afterwards.
    """
    with _environment:
        before = {name: os.environ.get(name) for name in _SETTINGS}
        os.environ.update(_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def on_device(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Use the caller's device and stream in this thread; both are set per thread."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield


def first_line(error: Exception) -> str:
    """Return the reason of an error; libraries add a stack after it."""
    return str(error).partition("\n")[0]


def key_of(group: BroadcastGroup | None) -> str:
    """Return the key of a group; an empty string if there is none."""
    return group.key if group is not None else ""


class _SenderEnd:
    """An engine's connection to one sender, and the group in which that sender broadcasts to the engine."""

    def __init__(self, line: TCPStore) -> None:
        self.line = line
        self.group: BroadcastGroup | None = None

    def drop_group(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.abort()
        self.group = None


class NcclSource:
    """An engine's end: one buffer of its own, and a connection and a group for each sender.

    Every rank of a trainer is a sender of its own part of a version.
    """

    private = True

    def __init__(self, *, device: torch.device | str = "cpu", patience: float = 10.0) -> None:
        """Create a source; `patience` is the longest wait for the group or for one bucket, in seconds."""
        self._device = exact(device)
        self._patience = patience
        self._name = uuid.uuid4().hex
        self._ends: dict[tuple[str, int], _SenderEnd] = {}
        self._version = -1
        self._used: set[tuple[str, int]] = set()
        """The senders of the version that was opened last."""
        self._buffer: torch.Tensor | None = None
        self._complete: tuple[str, int, int] | None = None

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Take part in a broadcast of the version; see `Source.open`."""
        self._complete = None
        place = parse_location(location)
        if (place.backend == "nccl") != (self._device.type == "cuda"):
            raise DeliveryError(f"{location} cannot be received on {self._device}")
        with self._all_or_nothing(place):
            self._keep_senders(place, version)
            nbytes = packed_bytes(entries)
            end = self._connected(place)
            held, answer = self._invited(end, place, version, nbytes)
            group = self._joined(end, place, answer)
            if self._buffer is None or len(self._buffer) < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            group.broadcast(answer.session, self._buffer, pieces(entries, answer.bucket_bytes))
            self._complete = (location, version, held.sequence)
            return unpack(self._buffer, entries)

    def verify(self, location: str, version: int) -> None:
        """Check in the sender's store that the place still holds what was broadcast."""
        if self._complete is None or self._complete[:2] != (location, version):
            raise DeliveryError(f"version {version} was not received from {location}")
        place = parse_location(location)
        with self._all_or_nothing(place):
            line = self._connected(place).line
            if bounded(lambda: _held(line, place, version), self._answers()).sequence != self._complete[2]:
                raise DeliveryError(f"{location} was written again while version {version} was received")

    def close(self) -> None:
        """Leave the groups, close the connections and release the memory."""
        while self._ends:
            self._ends.popitem()[1].drop_group()
        self._buffer = self._complete = None

    @contextlib.contextmanager
    def _all_or_nothing(self, place: NcclLocation) -> Iterator[None]:
        whole = False
        try:
            yield
            whole = True
        except dist.DistNetworkError as error:
            raise DeliveryError(f"the sender at {place.host}:{place.port} is gone") from error
        except RuntimeError as error:
            raise DeliveryError(f"the broadcast from {place} failed: {first_line(error)}") from error
        finally:
            if not whole:
                self.close()

    def _keep_senders(self, place: NcclLocation, version: int) -> None:
        """Leave the senders that had no part of the version before this one: they are of an earlier trainer process."""
        if version != self._version:
            for address in self._ends.keys() - self._used:
                self._ends.pop(address).drop_group()
            self._used.clear()
            self._version = version
        self._used.add((place.host, place.port))

    def _connected(self, place: NcclLocation) -> _SenderEnd:
        address = place.host, place.port
        if address not in self._ends:
            self._ends[address] = _SenderEnd(connect(*address, self._patience))
        return self._ends[address]

    def _answers(self) -> ProgressWatch:
        """Watch that the sender's store answers: a call to a store whose host is cut off would not return for long."""
        return ProgressWatch(self._patience, "waiting for the store of the sender of weights")

    def _invited(
        self, end: _SenderEnd, place: NcclLocation, version: int, nbytes: int
    ) -> tuple[HeldVersion, BroadcastReply]:
        """Ask for the version. Return what its place holds, and the invitation to a broadcast that begins now."""
        line, answers, group = end.line, self._answers(), key_of(end.group)

        def ask() -> tuple[HeldVersion, BroadcastReply]:
            held = _held(line, place, version)
            answers.made()
            if held.nbytes != nbytes:
                raise DeliveryError(f"version {version} at {place} has {held.nbytes} bytes, not {nbytes}")
            number = line.add(key("asks"), 1)
            # Raises if this call has been given up: a request sent now would replace this engine's next one.
            answers.made()
            request = BroadcastRequest(self._name, place.place, version, held.sequence, group)
            line.set(key("ask", number), msgspec.json.encode(request).decode())
            # Twice the patience, because the sender may be busy with a broadcast that fails.
            said = _await(line, key("answer", number), 2 * self._patience, answers)
            line.delete_key(key("answer", number))
            answers.made()
            answer = msgspec.json.decode(said, type=BroadcastReply)
            if answer.refusal:
                raise DeliveryError(f"the sender refused: {answer.refusal}")
            line.set(key("joined", answer.session, answer.rank), "yes")
            if (begun := _await(line, key("begin", answer.session), self._patience, answers).decode()) != "yes":
                raise DeliveryError(f"broadcast {answer.session} was called off: {begun}")
            return held, answer

        return bounded(ask, answers)

    def _joined(self, end: _SenderEnd, place: NcclLocation, answer: BroadcastReply) -> BroadcastGroup:
        if end.group is None or end.group.key != answer.group:
            end.drop_group()
            address = (place.host, place.port)
            end.group = BroadcastGroup(
                answer.group, place.backend, address, answer.rank, answer.size, self._device, self._patience
            )
        return end.group


def _await(line: TCPStore, awaited: str, patience: float, answers: ProgressWatch) -> bytes:
    """Return the value of a key once it is there. `answers` is told whenever the store answers."""
    # Polled, because a wait inside the store writes to the log when it times out.
    progress = ProgressWatch(patience, "waiting for the sender of weights")
    while not line.check([awaited]):
        answers.made()
        progress.check()
        time.sleep(POLL_SECONDS)
    return bytes(line.get(awaited))


def _held(line: TCPStore, place: NcclLocation, version: int) -> HeldVersion:
    held = msgspec.json.decode(line.get(key("held", place.place)), type=HeldVersion)
    if held.version != version:
        raise DeliveryError(f"{place} holds version {held.version}, not {version}: it was used again")
    if not held.whole:
        raise DeliveryError(f"version {version} at {place} was released, or is not written to its end")
    return held

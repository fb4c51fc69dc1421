"""An engine's end of the `nccl` transport: it asks for a version, joins the group that the sender forms, and receives.

The received bytes count only if the place still holds the same write afterwards. After any failure, the group, the
connection to the sender and the memory are discarded, so a late broadcast cannot change memory that is in use.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headrace.delivery.base import Entry
from headrace.delivery.plan import packed_bytes, unpack
from headrace.delivery.transports.nccl_group import (
    BroadcastGroup,
    BroadcastReply,
    BroadcastRequest,
    HeldVersion,
    NcclLocation,
    ProgressWatch,
    connect,
    exact,
    key,
    parse_location,
    pieces,
)
from headrace.errors import DeliveryError

_POLL_SECONDS = 0.001


class NcclSource:
    """An engine's end: one connection to the sender, one group, and one buffer of its own."""

    private = True

    def __init__(self, *, device: torch.device | str = "cpu", patience: float = 10.0) -> None:
        """Create a source; `patience` is the longest wait for the group or for one bucket, in seconds."""
        self._device = exact(device)
        self._patience = patience
        self._name = uuid.uuid4().hex
        self._line: tuple[str, int, TCPStore] | None = None
        self._group: BroadcastGroup | None = None
        self._buffer: torch.Tensor | None = None
        self._complete: tuple[str, int, int] | None = None

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Take part in a broadcast of the version; see `Source.open`."""
        self._complete = None
        place = parse_location(location)
        if (place.backend == "nccl") != (self._device.type == "cuda"):
            raise DeliveryError(f"{location} cannot be received on {self._device}")
        with self._all_or_nothing(place):
            line = self._connected(place)
            held = _held(line, place, version)
            nbytes = packed_bytes(entries)
            if held.nbytes != nbytes:
                raise DeliveryError(f"version {version} at {location} has {held.nbytes} bytes, not {nbytes}")
            answer = self._invited(
                line, BroadcastRequest(self._name, place.place, version, held.sequence, self._group_key())
            )
            group = self._joined(line, place, answer)
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
            if _held(self._connected(place), place, version).sequence != self._complete[2]:
                raise DeliveryError(f"{location} was written again while version {version} was received")

    def close(self) -> None:
        """Leave the group, close the connection and release the memory."""
        if self._group is not None:
            self._group.abort()
        self._line = self._group = self._buffer = self._complete = None

    @contextmanager
    def _all_or_nothing(self, place: NcclLocation) -> Iterator[None]:
        whole = False
        try:
            yield
            whole = True
        except dist.DistNetworkError as error:
            raise DeliveryError(f"the sender at {place.host}:{place.port} is gone") from error
        except RuntimeError as error:
            raise DeliveryError(f"the broadcast from {place} failed: {_first_line(error)}") from error
        finally:
            if not whole:
                self.close()

    def _connected(self, place: NcclLocation) -> TCPStore:
        if self._line is None or self._line[:2] != (place.host, place.port):
            self.close()
            self._line = (place.host, place.port, connect(place.host, place.port, self._patience))
        return self._line[2]

    def _group_key(self) -> str:
        return self._group.key if self._group is not None else ""

    def _invited(self, line: TCPStore, ask: BroadcastRequest) -> BroadcastReply:
        number = line.add(key("asks"), 1)
        line.set(key("ask", number), _text(ask))
        # Twice the patience, because the sender may be busy with a broadcast that fails.
        said = self._await(line, key("answer", number), 2 * self._patience)
        line.delete_key(key("answer", number))
        answer = msgspec.json.decode(said, type=BroadcastReply)
        if answer.refusal:
            raise DeliveryError(f"the sender refused: {answer.refusal}")
        return answer

    def _joined(self, line: TCPStore, place: NcclLocation, answer: BroadcastReply) -> BroadcastGroup:
        line.set(key("joined", answer.session, answer.rank), "yes")
        if (said := self._await(line, key("begin", answer.session), self._patience).decode()) != "yes":
            raise DeliveryError(f"broadcast {answer.session} was called off: {said}")
        if self._group is None or self._group.key != answer.group:
            if self._group is not None:
                self._group.abort()
                self._group = None
            address = (place.host, place.port)
            self._group = BroadcastGroup(
                answer.group, place.backend, address, answer.rank, answer.size, self._device, self._patience
            )
        return self._group

    def _await(self, line: TCPStore, awaited: str, patience: float) -> bytes:
        # Polled, because a wait inside the store writes to the log when it times out.
        progress = ProgressWatch(patience, "waiting for the sender of weights")
        while not line.check([awaited]):
            progress.check()
            time.sleep(_POLL_SECONDS)
        return bytes(line.get(awaited))


def _held(line: TCPStore, place: NcclLocation, version: int) -> HeldVersion:
    held = msgspec.json.decode(line.get(key("held", place.place)), type=HeldVersion)
    if held.version != version:
        raise DeliveryError(f"{place} holds version {held.version}, not {version}: it was used again")
    if not held.whole:
        raise DeliveryError(f"version {version} at {place} was released, or is not written to its end")
    return held


def _text(message: msgspec.Struct) -> str:
    return msgspec.json.encode(message).decode()


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]

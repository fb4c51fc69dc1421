"""The `tcp` transport, and an engine's end of it, which requests a few buckets at a time and receives them in place.

Every wait has a deadline. A broken connection is made again, and only the missing buckets are requested again; a later
`open` of the same version does the same. A server that is gone raises an error within about a second. If there are many
engines, an engine may fetch from another one; whatever goes wrong there, the bytes then come from the trainer.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.delivery.base import Entry
from headrace.delivery.plan import Views, packed_bytes
from headrace.delivery.transports.base import Sender, SenderSettings, Source, SourceSettings
from headrace.delivery.transports.tcp_paths import Connection, Into, connect
from headrace.delivery.transports.tcp_server import Relay, TcpSender
from headrace.delivery.transports.tcp_wire import BUCKET_BYTES, ReadReply, ReadRequest, TcpLocation, parse_location
from headrace.errors import DeliveryError

WINDOW = 4
"""The number of buckets in flight: enough that the connection never waits for a request."""
RESUMES = 6
"""After this many broken connections and failed attempts in a row, the server is considered dead."""
RELAY_PATIENCE = 3.0
"""The longest wait for one bucket from another engine. It is short, because the trainer has the bucket too."""
PARENT_SECONDS = 120.0
"""The longest wait until another engine has the version; after that it is fetched from the trainer."""
_ASK_AGAIN = 0.02
_SIGN_OF_LIFE = 1.0
"""How often an engine that fetches tells the trainer that it is still alive."""

logger = logging.getLogger(__name__)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Grown = Callable[[Mapping[str, torch.Tensor], int], None]


class _Fetch:
    """The progress of fetching one version."""

    def __init__(self, location: str, version: int, nbytes: int) -> None:
        self.key = (location, version, nbytes)
        self.sequence: int | None = None
        self.missing = deque(range(0, nbytes, BUCKET_BYTES))
        self.relay = ""
        """The location of the relay that some of the bytes came from; empty if all came from the trainer."""
        self.grown: Callable[[int], None] = lambda nbytes: None
        """Called with the number of bytes from the beginning that have arrived."""

    def tell(self) -> None:
        """Report how many bytes have arrived without a gap."""
        self.grown(self.missing[0] if self.missing else self.key[2])


class TcpSource:
    """An engine's end: one connection, one buffer of its own, and a relay once it shares versions with others."""

    private = True

    def __init__(self, *, keys: Path | None = None, patience: float = 10.0) -> None:
        """Create a source; `patience` is the longest wait for one bucket from the trainer, in seconds."""
        self._keys = keys
        self._patience = patience
        self._name = uuid.uuid4().hex
        self._line: Connection | None = None
        self._buffer: torch.Tensor | None = None
        self._views: Views | None = None
        self._fetch: _Fetch | None = None
        self._complete: _Fetch | None = None
        self._suspect: _Fetch | None = None
        self.relay: Relay | None = None
        """The server from which other engines fetch versions of this one; None until the first version is shared."""
        self._ticket = 0

    @property
    def relayed(self) -> bool:
        """Whether the version that was opened last came from another engine and is not proved yet."""
        return self._suspect is not None

    def open(self, location: str, version: int, entries: Sequence[Entry]) -> dict[str, torch.Tensor]:
        """Fetch the version; see `Source.open`. If it was relayed before and not proved, fetch it from the trainer."""
        return self.open_growing(location, version, entries, lambda weights, nbytes: None)

    def open_growing(
        self, location: str, version: int, entries: Sequence[Entry], grown: Grown
    ) -> dict[str, torch.Tensor]:
        """Fetch the version and report progress; see `Growing.open_growing`."""
        nbytes = packed_bytes(entries)
        if self.relay is not None:
            self.relay.withdraw()
        suspect, self._complete, self._suspect = self._suspect, None, None
        # Buckets of a failed attempt are used again. A completed fetch is not: its digest may have been wrong.
        if self._fetch is None or self._fetch.key != (location, version, nbytes):
            self._fetch = _Fetch(location, version, nbytes)
            if self._buffer is None or len(self._buffer) < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8)
                self._views = Views(self._buffer)
        assert self._buffer is not None
        assert self._views is not None
        distrusted = suspect.relay if suspect is not None and suspect.key == self._fetch.key else ""
        weights = self._views.of(entries)
        self._fetch.grown = partial(grown, weights)
        try:
            self._fetch.tell()
            self._bring(self._fetch, self._buffer.numpy(), distrusted)
        except _Refused:
            self._fetch = None
            raise
        self._complete, self._fetch = self._fetch, None
        self._suspect = self._complete if self._complete.relay else None
        return weights

    def verify(self, location: str, version: int) -> None:
        """Ask the trainer whether the place still holds the same write of this version."""
        if self._complete is None or self._complete.key[:2] != (location, version):
            raise DeliveryError(f"version {version} was not fetched from {location}")
        parsed = parse_location(location)
        answer = self._told(parsed, version)
        if answer.sequence != self._complete.sequence:
            raise DeliveryError(f"{location} was written again while version {version} was fetched")

    def share(self, location: str, version: int) -> None:
        """Offer the version that was opened last, and is proved now, to other engines, if the trainer wants a tree."""
        done, parsed = self._complete, parse_location(location)
        self._suspect = None
        if done is None or done.key[:2] != (location, version) or not parsed.tree:
            return
        assert self._buffer is not None
        assert done.sequence is not None
        try:
            self.relay = self.relay or Relay(parsed, self._keys)
            self.relay.serve(version, done.sequence, self._buffer[: done.key[2]])
            # The reply is not awaited. If the offer is lost, nobody fetches from here, which does no harm.
            self._connected(parsed).send(
                ReadRequest(0, parsed.place, version, 0, 0, self._name, offer=self.relay.location)
            )
        except DeliveryError as error:
            logger.warning("version %d is not handed on to other engines: %s", version, error)

    def close(self) -> None:
        """Close the connection and the relay, and release the memory."""
        if self.relay is not None:
            self.relay.close()
            self.relay = None
        self._disconnect()
        self._buffer = self._views = self._fetch = self._complete = self._suspect = None

    def _bring(self, fetch: _Fetch, buffer: Bytes, distrusted: str) -> None:
        """Fetch all missing buckets from the parent that the trainer names; if that fails, from the trainer itself."""
        location, version, _ = fetch.key
        parsed = parse_location(location)
        if distrusted:
            logger.warning("version %d was wrong as %s sent it: it is fetched from the trainer", version, distrusted)
        parent = self._parent(fetch, parsed, distrusted) if parsed.tree else ""
        if parent and not distrusted:
            try:
                self._pull_from_relay(fetch, buffer, parent)
            except DeliveryError as error:
                logger.warning("version %d does not come from its relay, but from the trainer: %s", version, error)
                self._parent(fetch, parsed, parent)
        self._pull(fetch, buffer, self._connected(parsed), parsed, self._patience)

    def _parent(self, fetch: _Fetch, parsed: TcpLocation, lost: str) -> str:
        """Ask the trainer whom to fetch from, and take the expected `sequence` from its reply.

        `lost` is a relay that failed; the trainer then sends nobody else there.
        """
        deadline = time.monotonic() + PARENT_SECONDS
        while True:
            answer = self._told(parsed, fetch.key[1], engine=self._name, lost=lost)
            self._check(fetch, answer)
            if not answer.wait or time.monotonic() > deadline:
                return answer.parent
            time.sleep(_ASK_AGAIN)

    def _pull_from_relay(self, fetch: _Fetch, buffer: Bytes, parent: str) -> None:
        trainer, relay = parse_location(fetch.key[0]), parse_location(parent)
        if relay.encrypted != trainer.encrypted:
            raise DeliveryError(f"{parent} is not encrypted as the trainer is")
        line = connect(relay, self._keys)
        fetch.relay = parent
        try:
            self._pull(fetch, buffer, line, relay, RELAY_PATIENCE)
        finally:
            line.close()

    def _pull(self, fetch: _Fetch, buffer: Bytes, line: Connection, server: TcpLocation, patience: float) -> None:
        _, version, nbytes = fetch.key
        asked: set[int] = set()
        broken = 0
        self._ticket += 1
        told = time.monotonic()
        while fetch.missing:
            for start in fetch.missing:
                if len(asked) >= WINDOW:
                    break
                if start not in asked:
                    line.send(
                        ReadRequest(self._ticket, server.place, version, start, min(nbytes, start + BUCKET_BYTES))
                    )
                    asked.add(start)
            if time.monotonic() - told > _SIGN_OF_LIFE:
                told = time.monotonic()
                self._say_alive(fetch)
            answer = self._awaited(line, patience, partial(self._room, fetch, buffer))
            if answer is None:
                broken += 1
                if broken > RESUMES:
                    if line is self._line:
                        self._disconnect()
                    raise DeliveryError(f"the server at {server.endpoint} is gone")
                asked.clear()
                self._ticket += 1
                continue
            broken = 0
            fetch.missing.remove(answer.start)
            fetch.tell()
            asked.discard(answer.start)

    def _say_alive(self, fetch: _Fetch) -> None:
        """Tell the trainer that this engine still fetches, because other engines may wait for its copy."""
        parsed = parse_location(fetch.key[0])
        if parsed.tree and self._line is not None:
            self._line.send(ReadRequest(0, parsed.place, fetch.key[1], 0, 0, self._name))

    def _told(self, parsed: TcpLocation, version: int, *, engine: str = "", lost: str = "") -> ReadReply:
        """Send a request without bytes to the trainer and return its reply."""
        line = self._connected(parsed)
        for _ in range(RESUMES):
            self._ticket += 1
            line.send(ReadRequest(self._ticket, parsed.place, version, 0, 0, engine, lost=lost))
            answer = self._awaited(line, self._patience)
            if answer is not None:
                return answer
        self._disconnect()
        raise DeliveryError(f"the server at {line.endpoint} is gone")

    def _awaited(self, line: Connection, patience: float, into: Into = lambda answer, nbytes: None) -> ReadReply | None:
        """Return the next reply with the current ticket; replies to requests that were given up are dropped."""

        def wanted(answer: ReadReply, nbytes: int) -> memoryview | None:
            return into(answer, nbytes) if answer.ticket == self._ticket and not answer.refusal else None

        deadline = time.monotonic() + patience
        while (left := deadline - time.monotonic()) > 0:
            answer = line.receive(left, wanted)
            if answer is None or answer.ticket == self._ticket:
                if answer is not None and answer.refusal:
                    raise _Refused(f"the server at {line.endpoint} refused: {answer.refusal}")
                return answer
        raise DeliveryError(f"the server at {line.endpoint} said nothing of use for {patience:.3g} s")

    def _room(self, fetch: _Fetch, buffer: Bytes, answer: ReadReply, nbytes: int) -> memoryview:
        """Return the memory for the bytes of this reply; raises unless they are a missing bucket."""
        self._check(fetch, answer)
        stop = min(fetch.key[2], answer.start + BUCKET_BYTES)
        if answer.stop != stop or nbytes != stop - answer.start or answer.start not in fetch.missing:
            raise _Refused(f"{fetch.key[0]} sent {nbytes} bytes that were not asked for")
        return buffer.data[answer.start : answer.stop]

    def _check(self, fetch: _Fetch, answer: ReadReply) -> None:
        location, version, nbytes = fetch.key
        if fetch.sequence is None:
            fetch.sequence = answer.sequence
        if answer.sequence != fetch.sequence:
            raise _Refused(f"{location} was written again while version {version} was fetched")
        if answer.nbytes != nbytes:
            raise _Refused(f"version {version} at {location} has {answer.nbytes} bytes, not {nbytes}")

    def _connected(self, location: TcpLocation) -> Connection:
        if self._line is not None and self._line.server != (location.endpoint, location.encrypted):
            self._disconnect()
        if self._line is None:
            self._line = connect(location, self._keys)
        self._line.drop_old_answers()
        return self._line

    def _disconnect(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


class Transport:
    """The `tcp` transport: sockets, which are encrypted beyond loopback."""

    uses_keys = True

    def sender(self, settings: SenderSettings) -> Sender:
        """See `base.Transport.sender`."""
        receivers = settings.receivers if settings.relays else 1
        return TcpSender(bind=settings.bind, keys=settings.keys, receivers=receivers)

    def source(self, settings: SourceSettings) -> Source:
        """See `base.Transport.source`."""
        return TcpSource(keys=settings.keys)


class _Refused(DeliveryError):
    """The server cannot serve this version, so nothing of this attempt can be used."""

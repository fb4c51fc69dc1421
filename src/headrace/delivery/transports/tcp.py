"""The `tcp` transport, and an engine's end of it, which requests a few buckets at a time and receives them in place.

Every wait has a deadline. A broken connection is made again, and only the missing buckets are requested again; a later
`open` of the same version does the same. A server that is gone raises an error within about a second. If there are many
engines, an engine may fetch from another one; whatever goes wrong there, the bytes then come from the trainer.
"""

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from headrace.delivery.base import Entry
from headrace.delivery.plan import Views, packed_bytes
from headrace.delivery.transports.base import ReadSpan, Sender, SenderSettings, Source, SourceSettings
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

Grown = Callable[[Mapping[str, torch.Tensor], int], None]


class _Fetch:
    def __init__(self, location: str, version: int, nbytes: int) -> None:
        self.key = (location, version, nbytes)
        self.trainer = parse_location(location)
        self.sequence: int | None = None
        self.relay = ""
        """The location of the relay that some of the bytes came from; empty if all came from the trainer."""
        self.seek(0, memoryview(b""))

    def seek(self, start: int, memory: memoryview) -> None:
        """Fetch from this packed byte on, until the memory is full."""
        self.memory, self.start, self.stop = memory, start, start + len(memory)
        self.missing = deque(range(start, self.stop, BUCKET_BYTES))

    def check(self, answer: ReadReply) -> None:
        """Raise `_Refused` unless the reply is about the same write as all others, and about as many bytes."""
        location, version, nbytes = self.key
        if self.sequence is None:
            self.sequence = answer.sequence
        if answer.sequence != self.sequence:
            raise _Refused(f"{location} was written again while version {version} was fetched")
        if answer.nbytes != nbytes:
            raise _Refused(f"version {version} at {location} has {answer.nbytes} bytes, not {nbytes}")

    def room(self, answer: ReadReply, nbytes: int) -> memoryview:
        """Return the memory for the bytes of this reply; raises unless they are a missing bucket."""
        self.check(answer)
        stop = min(self.stop, answer.start + BUCKET_BYTES)
        if answer.stop != stop or nbytes != stop - answer.start or answer.start not in self.missing:
            raise _Refused(f"{self.key[0]} sent {nbytes} bytes that were not asked for")
        return self.memory[answer.start - self.start : stop - self.start]


class TcpSource:
    """An engine's end: one connection, memory of its own, and a relay once it shares versions with others."""

    private = True

    def __init__(self, *, keys: Path | None = None, patience: float = 10.0) -> None:
        """Create a source; `patience` is the longest wait for one bucket from the trainer, in seconds."""
        self._keys = keys
        self._patience = patience
        self._name = uuid.uuid4().hex
        self._line: Connection | None = None
        self._memory = Views(torch.empty(0, dtype=torch.uint8))
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
            if len(self._memory.packed) < nbytes:
                self._memory = Views(torch.empty(nbytes, dtype=torch.uint8))
            self._fetch = _Fetch(location, version, nbytes)
            self._fetch.seek(0, self._memory.packed.numpy().data[:nbytes])
        distrusted = suspect.relay if suspect is not None and suspect.key == self._fetch.key else ""
        weights = self._memory.of(entries)
        try:
            self._bring(self._fetch, distrusted, partial(grown, weights))
        except _Refused:
            self._fetch = None
            raise
        self._complete, self._fetch = self._fetch, None
        self._suspect = self._complete if self._complete.relay else None
        return weights

    @contextmanager
    def spans(self, location: str, version: int, entries: Sequence[Entry]) -> Iterator[ReadSpan]:
        """Fetch the version from the trainer, never from a relay; see `Spanning.spans`."""
        if self.relay is not None:
            self.relay.withdraw()
        self._fetch = self._suspect = None
        self._complete = fetch = _Fetch(location, version, packed_bytes(entries))

        def read(start: int, into: memoryview) -> None:
            fetch.seek(start, into)
            line = self._connected(fetch.trainer)
            self._pull(fetch, line, fetch.trainer.place, self._patience, lambda nbytes: None)

        yield read

    def verify(self, location: str, version: int) -> None:
        """Ask the trainer whether the place still holds the same write of this version."""
        if self._complete is None or self._complete.key[:2] != (location, version):
            raise DeliveryError(f"version {version} was not fetched from {location}")
        if self._told(self._complete).sequence != self._complete.sequence:
            raise DeliveryError(f"{location} was written again while version {version} was fetched")

    def share(self, location: str, version: int) -> None:
        """Offer the version that was opened last, and is proved now, to other engines, if the trainer wants a tree."""
        done = self._complete
        self._suspect = None
        if done is None or done.key[:2] != (location, version) or not done.trainer.tree:
            return
        assert done.sequence is not None
        try:
            self.relay = self.relay or Relay(done.trainer, self._keys)
            self.relay.serve(version, done.sequence, self._memory.packed[: done.key[2]])
            # The reply is not awaited. If the offer is lost, nobody fetches from here, which does no harm.
            line = self._connected(done.trainer)
            line.send(ReadRequest(0, done.trainer.place, version, 0, 0, self._name, offer=self.relay.location))
        except DeliveryError as error:
            logger.warning("version %d is not handed on to other engines: %s", version, error)

    def close(self) -> None:
        """Close the connection and the relay, and release the memory."""
        if self.relay is not None:
            self.relay.close()
            self.relay = None
        self._disconnect()
        self._memory = Views(torch.empty(0, dtype=torch.uint8))
        self._fetch = self._complete = self._suspect = None

    def _bring(self, fetch: _Fetch, distrusted: str, grown: Callable[[int], None]) -> None:
        """Fetch all missing buckets from the parent that the trainer names; if that fails, from the trainer itself."""
        version = fetch.key[1]
        if distrusted:
            logger.warning("version %d was wrong as %s sent it: it is fetched from the trainer", version, distrusted)
        parent = self._parent(fetch, distrusted) if fetch.trainer.tree else ""
        if parent and not distrusted:
            try:
                relay = parse_location(parent)
                if relay.encrypted != fetch.trainer.encrypted:
                    raise DeliveryError(f"{parent} is not encrypted as the trainer is")
                with closing(connect(relay, self._keys)) as line:
                    fetch.relay = parent
                    self._pull(fetch, line, relay.place, RELAY_PATIENCE, grown)
            except DeliveryError as error:
                logger.warning("version %d does not come from its relay, but from the trainer: %s", version, error)
                self._parent(fetch, parent)
        self._pull(fetch, self._connected(fetch.trainer), fetch.trainer.place, self._patience, grown)

    def _parent(self, fetch: _Fetch, lost: str) -> str:
        """Ask the trainer whom to fetch from, and take the expected `sequence` from its reply.

        `lost` is a relay that failed; the trainer then sends nobody else there.
        """
        deadline = time.monotonic() + PARENT_SECONDS
        while True:
            answer = self._told(fetch, engine=self._name, lost=lost)
            fetch.check(answer)
            if not answer.wait or time.monotonic() > deadline:
                return answer.parent
            time.sleep(_ASK_AGAIN)

    def _pull(self, fetch: _Fetch, line: Connection, place: int, patience: float, grown: Callable[[int], None]) -> None:
        """Fetch all missing buckets from one server; `grown` gets the number of bytes that arrived without a gap."""
        version = fetch.key[1]
        asked: set[int] = set()
        broken = 0
        self._ticket += 1
        told = time.monotonic()
        grown(fetch.missing[0] if fetch.missing else fetch.stop)
        while fetch.missing:
            for start in fetch.missing:
                if len(asked) >= WINDOW:
                    break
                if start not in asked:
                    line.send(ReadRequest(self._ticket, place, version, start, min(fetch.stop, start + BUCKET_BYTES)))
                    asked.add(start)
            if time.monotonic() - told > _SIGN_OF_LIFE:
                told = time.monotonic()
                if fetch.trainer.tree and self._line is not None:
                    # Other engines may wait for this engine's copy, so the trainer must know that it still fetches.
                    self._line.send(ReadRequest(0, fetch.trainer.place, version, 0, 0, self._name))
            answer = self._awaited(line, patience, fetch.room)
            if answer is None:
                broken += 1
                if broken > RESUMES:
                    if line is self._line:
                        self._disconnect()
                    raise DeliveryError(f"the server at {line.endpoint} is gone")
                asked.clear()
                self._ticket += 1
                continue
            broken = 0
            fetch.missing.remove(answer.start)
            asked.discard(answer.start)
            grown(fetch.missing[0] if fetch.missing else fetch.stop)

    def _told(self, fetch: _Fetch, *, engine: str = "", lost: str = "") -> ReadReply:
        line = self._connected(fetch.trainer)
        for _ in range(RESUMES):
            self._ticket += 1
            line.send(ReadRequest(self._ticket, fetch.trainer.place, fetch.key[1], 0, 0, engine, lost=lost))
            answer = self._awaited(line, self._patience)
            if answer is not None:
                return answer
        self._disconnect()
        raise DeliveryError(f"the server at {line.endpoint} is gone")

    def _awaited(self, line: Connection, patience: float, into: Into = lambda answer, nbytes: None) -> ReadReply | None:
        """Return the next reply with the current ticket; replies to requests that were given up are dropped.

        After a silence the connection to the trainer is given up. If the host was cut off, a new connection works at
        once when the link is back, while the old one may wait for a minute until it sends again what was lost.
        """

        def wanted(answer: ReadReply, nbytes: int) -> memoryview | None:
            return into(answer, nbytes) if answer.ticket == self._ticket and not answer.refusal else None

        deadline = time.monotonic() + patience
        try:
            while (left := deadline - time.monotonic()) > 0:
                answer = line.receive(left, wanted)
                if answer is None or answer.ticket == self._ticket:
                    if answer is not None and answer.refusal:
                        raise _Refused(f"the server at {line.endpoint} refused: {answer.refusal}")
                    return answer
            raise DeliveryError(f"the server at {line.endpoint} said nothing of use for {patience:.3g} s")
        except _Refused:
            raise
        except DeliveryError:
            if line is self._line:
                self._disconnect()
            raise

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

"""The trainer's end of the `nccl` transport: one broadcast sends a packed version to all engines that asked for it.

A version is broadcast from its packed bytes, and only while it is complete and not released. A key-value store says
which write each place holds, and every engine checks the store before and after a broadcast. The group of a broadcast
has exactly the engines that asked for the same write, and is kept while its members stay the same. If an engine dies,
the others lose only that one broadcast: every wait has a deadline, and the next broadcast has a new group.
"""

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from headrace.delivery.plan import PackingPlan, pack, unpack
from headrace.delivery.transports.base import LIMIT, PlacedSender, Sender, SenderSettings, Source, SourceSettings
from headrace.delivery.transports.collectives import LOOPBACK, check_address, listen
from headrace.delivery.transports.nccl_group import (
    BUCKET_BYTES,
    POLL_SECONDS,
    BroadcastGroup,
    BroadcastReply,
    BroadcastRequest,
    HeldVersion,
    NcclLocation,
    NcclSource,
    ProgressWatch,
    connect,
    exact,
    first_line,
    key,
    key_of,
    on_device,
    pieces,
)
from headrace.errors import ConfigError, DeliveryError

logger = logging.getLogger(__name__)


class _Snapshot:
    """One place of a sender: its bytes, the version they hold, and on a GPU the event after which they are written."""

    def __init__(self, device: torch.device) -> None:
        self.held = HeldVersion()
        self.plan: PackingPlan | None = None
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._packed: torch.cuda.Event | None = None

    def fill(self, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights into this place, on the current stream."""
        if len(self.buffer) != plan.nbytes:
            self.buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device=self.buffer.device)
        self.plan = plan
        pack(self.buffer, plan.entries, weights)
        if self.buffer.is_cuda:
            self._packed = torch.cuda.current_stream(self.buffer.device).record_event()

    def ready(self) -> torch.Tensor:
        """Return the bytes, and make the current stream wait until they are written."""
        if self._packed is not None:
            torch.cuda.current_stream(self.buffer.device).wait_event(self._packed)
        return self.buffer


class _Pending(msgspec.Struct):
    number: int
    ask: BroadcastRequest
    since: float


class NcclSender(PlacedSender):
    """The trainer's end: a store into which engines put their requests, and a thread that broadcasts."""

    name = "nccl"

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        receivers: int = 1,
        per_parameter: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        bind: str = LOOPBACK,
        trusted_network: bool = False,
        joining: float = 0.5,
        patience: float = 10.0,
    ) -> None:
        """Create a sender; for weights on the CPU, gloo makes the same broadcasts.

        `receivers` is the number of engines. A broadcast begins when all of them have asked for the version or have it
        already, but at the latest `joining` seconds after the first request. `patience` is the longest wait for one
        step of a broadcast, in seconds. `bind` is an address of this host. It is beyond loopback only on a trusted
        network, because broadcasts are neither encrypted nor authenticated.
        """
        super().__init__("snapshot")
        check_address(bind, trusted_network, '[delivery] transport = "nccl"')
        self._device = exact(device)
        self._backend = "nccl" if self._device.type == "cuda" else "gloo"
        if self._backend == "gloo":
            logger.warning("the weights are on the CPU: the nccl transport broadcasts them with gloo")
        self._receivers = receivers
        self._bucket_bytes = 0 if per_parameter else bucket_bytes
        self._joining = joining
        self._patience = patience
        self._changed = threading.Condition()
        self._snapshots = [_Snapshot(self._device) for _ in range(LIMIT)]
        self._sequence = 0
        try:
            self._store: TCPStore | None = listen(bind, patience)
        except OSError as error:
            raise ConfigError(f"[delivery] bind: cannot listen on {bind}: {error.strerror}") from error
        self._address = bind, self._store.port
        self._locations = [str(NcclLocation(self._backend, *self._address, place)) for place in range(LIMIT)]
        for place in range(LIMIT):
            self._hold(place, HeldVersion())
        # The thread that broadcasts uses the attributes below alone, until it has ended.
        # A separate stream: on the trainer's, a broadcast would wait for training steps that are already enqueued.
        self._stream = torch.cuda.Stream(self._device) if self._backend == "nccl" else None  # type: ignore[no-untyped-call]
        self._line: Any = connect(*self._address, patience)
        # Groups of an earlier sender, perhaps on the same port, have other names.
        self._epoch = uuid.uuid4().hex
        self._session = 0
        self._read = 0
        self._pending: list[_Pending] = []
        self._served: dict[int, set[str]] = {}
        self._group: BroadcastGroup | None = None
        self._members: list[str] = []
        self._server = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._server.start()

    def finish(self, location: str) -> None:
        """Allow engines to request the version."""
        place = self._locations.index(location)
        with self._changed:
            if not self._holds(location):
                raise DeliveryError(f"snapshot {location} was released, or the transport is closed")
            self._hold(place, msgspec.structs.replace(self._snapshots[place].held, whole=True))
            self._changed.notify_all()

    def release(self, location: str) -> None:
        """Stop broadcasting the snapshot and allow it to be overwritten."""
        place = self._locations.index(location)
        with self._changed:
            self._hold(place, msgspec.structs.replace(self._snapshots[place].held, whole=False))
        super().release(location)

    def close(self) -> None:
        """End the group, and release the port and the memory. A broadcast that is under way fails."""
        super().close()
        with self._changed:
            self._changed.notify_all()
        self._server.join(4 * self._patience)
        with self._changed:
            self._drop_group()
            self._line = self._store = None
            self._snapshots[:] = [_Snapshot(self._device) for _ in range(LIMIT)]

    def _choose(self, version: int, nbytes: int, held: Collection[str]) -> str:
        return next(location for location in self._locations if location not in held)

    def _fill(self, location: str, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        place = self._locations.index(location)
        with self._changed:
            self._sequence += 1
            self._hold(place, HeldVersion(version, self._sequence, plan.nbytes))
        self._snapshots[place].fill(plan, weights)

    def _views(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        return unpack(self._snapshots[self._locations.index(location)].ready(), plan.entries)

    def _hold(self, place: int, held: HeldVersion) -> None:
        self._snapshots[place].held = held
        if self._store is not None:
            self._store.set(key("held", place), msgspec.json.encode(held).decode())

    def _serve(self) -> None:
        while self._armed():
            try:
                if not self._serve_due():
                    time.sleep(POLL_SECONDS)
            except dist.DistNetworkError:
                logger.exception("the store of the nccl transport is gone: no more weights are broadcast")
                return
            except (DeliveryError, RuntimeError) as error:
                logger.warning("a broadcast of weights failed: %s", first_line(error))
                time.sleep(POLL_SECONDS)

    def _armed(self) -> bool:
        """Wait until there is a version that engines may request; return False if the transport is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or any(snapshot.held.whole for snapshot in self._snapshots))
            return not self._ended

    def _serve_due(self) -> bool:
        """Read new requests and serve those that are due; return False if none are due.

        An error of a broadcast is raised; the next call continues with another group.
        """
        self._read_questions()
        members = self._due()
        if not members:
            return False
        self._pending = [pending for pending in self._pending if pending not in members]
        with contextlib.ExitStack() as undo:
            undo.callback(self._drop_group)
            self._broadcast(members)
            undo.pop_all()
        return True

    def _read_questions(self) -> None:
        while self._line.check([key("ask", self._read + 1)]):
            self._read += 1
            ask = msgspec.json.decode(self._line.get(key("ask", self._read)), type=BroadcastRequest)
            self._line.delete_key(key("ask", self._read))
            # An engine that asks again has given up its previous request.
            self._pending = [pending for pending in self._pending if pending.ask.receiver != ask.receiver]
            if refusal := self._refusal(ask):
                self._answer(self._read, BroadcastReply(refusal=refusal))
            else:
                self._pending.append(_Pending(self._read, ask, time.monotonic()))

    def _due(self) -> list[_Pending]:
        """Return the requests that are to be served together now; empty if none are due."""
        if not self._pending:
            return []
        oldest = self._pending[0]
        # A write has one place, so its number says which requests can be served together.
        members = [pending for pending in self._pending if pending.ask.sequence == oldest.ask.sequence]
        missing = self._receivers - len(self._served.get(oldest.ask.sequence, ())) - len(members)
        return members if missing <= 0 or time.monotonic() - oldest.since >= self._joining else []

    def _broadcast(self, members: list[_Pending]) -> None:
        first = members[0].ask
        if refusal := self._refusal(first):
            for pending in members:
                self._answer(pending.number, BroadcastReply(refusal=refusal))
            return
        self._session += 1
        names = [pending.ask.receiver for pending in members]
        kept = self._group is not None and sorted(names) == sorted(self._members)
        if not kept or any(pending.ask.group != key_of(self._group) for pending in members):
            self._drop_group()
            self._members = names
        group = key_of(self._group) or f"{self._epoch}-{self._session}"
        for pending in members:
            rank = self._members.index(pending.ask.receiver) + 1
            answer = BroadcastReply(self._session, group, rank, len(members) + 1, self._bucket_bytes)
            self._answer(pending.number, answer)
        self._assemble(len(members))
        if self._group is None:
            self._group = BroadcastGroup(
                group, self._backend, self._address, 0, len(members) + 1, self._device, self._patience
            )
        snapshot = self._snapshots[first.place]
        assert snapshot.plan is not None
        with on_device(self._device, self._stream):
            self._group.broadcast(self._session, snapshot.ready(), pieces(snapshot.plan.entries, self._bucket_bytes))
        live = {snapshot.held.sequence for snapshot in self._snapshots}
        self._served = {sequence: served for sequence, served in self._served.items() if sequence in live}
        self._served.setdefault(first.sequence, set()).update(names)

    def _assemble(self, members: int) -> None:
        """Wait until all invited engines have joined; an engine that died after its request is noticed here."""
        self._line.delete_key(key("begin", self._session - 1))
        progress = ProgressWatch(self._patience, "waiting for engines to join")
        ranks = range(1, members + 1)
        while absent := [rank for rank in ranks if not self._line.check([key("joined", self._session, rank)])]:
            if progress.left() < 0:
                self._line.set(key("begin", self._session), f"{len(absent)} of {members} engines did not join")
                raise DeliveryError(f"{len(absent)} of {members} engines asked for weights and did not join")
            time.sleep(POLL_SECONDS)
        self._line.set(key("begin", self._session), "yes")
        for rank in ranks:
            self._line.delete_key(key("joined", self._session, rank))

    def _refusal(self, ask: BroadcastRequest) -> str:
        held = self._snapshots[ask.place].held if 0 <= ask.place < len(self._snapshots) else HeldVersion()
        if (held.version, held.sequence) != (ask.version, ask.sequence):
            return f"place {ask.place} holds version {held.version}, not {ask.version}: it was used again"
        return "" if held.whole else f"version {ask.version} was released"

    def _answer(self, number: int, answer: BroadcastReply) -> None:
        self._line.set(key("answer", number), msgspec.json.encode(answer).decode())

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._members = None, []


class Transport:
    """The `nccl` transport: a broadcast, by NCCL between GPUs and by gloo elsewhere."""

    on_device = True
    own_gpus = True  # NCCL refuses two processes on one GPU.
    needs_trust = True

    def sender(self, settings: SenderSettings) -> Sender:
        """See `base.Transport.sender`."""
        return NcclSender(
            device=settings.device,
            receivers=settings.receivers,
            bind=settings.bind,
            trusted_network=settings.trusted_network,
            per_parameter=settings.per_parameter,
        )

    def source(self, settings: SourceSettings) -> Source:
        """See `base.Transport.source`."""
        return NcclSource(device=settings.device)

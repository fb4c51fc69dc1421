"""The broadcasts of a sender, one after another: engines that ask are invited, join, and receive the version.

The group of a broadcast has exactly the engines that asked for the same write, and is kept while its members stay the
same. If an engine dies, the others lose only that one broadcast: every wait has a deadline, and the next broadcast has
a new group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from headrace.delivery.plan import PackingPlan, pack
from headrace.delivery.transports.nccl_group import BroadcastGroup, ProgressWatch, connect, on_device
from headrace.delivery.transports.nccl_wire import (
    BroadcastReply,
    BroadcastRequest,
    HeldVersion,
    answer_key,
    ask_key,
    begin_key,
    joined_key,
    pieces,
)
from headrace.errors import DeliveryError

POLL_SECONDS = 0.001


class HeldSnapshot:
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
    """A request that waits for its broadcast."""

    number: int
    ask: BroadcastRequest
    since: float

    @property
    def wanted(self) -> tuple[int, int]:
        """The wanted place and write; requests for the same can be served together."""
        return self.ask.place, self.ask.sequence


class BroadcastSessions:
    """The requests and broadcasts of one sender. Used by one thread, except `close`, which is called after it ended."""

    def __init__(
        self,
        snapshots: Sequence[HeldSnapshot],
        backend: str,
        address: tuple[str, int],
        device: torch.device,
        *,
        receivers: int,
        bucket_bytes: int,
        joining: float,
        patience: float,
    ) -> None:
        """Create the sessions; `snapshots` are the sender's places. See `NcclSender` for the other arguments."""
        self._snapshots = snapshots
        self._backend = backend
        self._address = address
        self._device = device
        # A separate stream: on the trainer's, a broadcast would wait for training steps that are already enqueued.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._receivers = receivers
        self._bucket_bytes = bucket_bytes
        self._joining = joining
        self._patience = patience
        self._line: Any = connect(*address, patience)
        self._session = 0
        self._read = 0
        self._pending: list[_Pending] = []
        self._served: dict[int, set[str]] = {}
        self._group: BroadcastGroup | None = None
        self._members: list[str] = []

    def serve(self) -> bool:
        """Read new requests and serve those that are due; return False if none are due.

        An error of a broadcast is raised; the next call continues with another group.
        """
        self._read_questions()
        members = self._due()
        if not members:
            return False
        self._pending = [pending for pending in self._pending if pending not in members]
        served = False
        try:
            self._broadcast(members)
            served = True
        finally:
            if not served:
                self._drop_group()
        return True

    def close(self) -> None:
        """End the group and close the connection to the store."""
        self._drop_group()
        self._line = None

    def _read_questions(self) -> None:
        while self._line.check([ask_key(self._read + 1)]):
            self._read += 1
            ask = msgspec.json.decode(self._line.get(ask_key(self._read)), type=BroadcastRequest)
            self._line.delete_key(ask_key(self._read))
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
        members = [pending for pending in self._pending if pending.wanted == oldest.wanted]
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
        if not kept or any(pending.ask.group != self._group_key() for pending in members):
            self._drop_group()
            self._members = names
        key = self._group_key() or f"group-{self._session}"
        for pending in members:
            rank = self._members.index(pending.ask.receiver) + 1
            answer = BroadcastReply(self._session, key, rank, len(members) + 1, self._bucket_bytes)
            self._answer(pending.number, answer)
        self._assemble(len(members))
        if self._group is None:
            self._group = BroadcastGroup(
                key, self._backend, self._address, 0, len(members) + 1, self._device, self._patience
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
        self._line.delete_key(begin_key(self._session - 1))
        progress = ProgressWatch(self._patience, "waiting for engines to join")
        ranks = range(1, members + 1)
        while absent := [rank for rank in ranks if not self._line.check([joined_key(self._session, rank)])]:
            if progress.left() < 0:
                self._line.set(begin_key(self._session), f"{len(absent)} of {members} engines did not join")
                raise DeliveryError(f"{len(absent)} of {members} engines asked for weights and did not join")
            time.sleep(POLL_SECONDS)
        self._line.set(begin_key(self._session), "yes")
        for rank in ranks:
            self._line.delete_key(joined_key(self._session, rank))

    def _refusal(self, ask: BroadcastRequest) -> str:
        held = self._snapshots[ask.place].held if 0 <= ask.place < len(self._snapshots) else HeldVersion()
        if (held.version, held.sequence) != (ask.version, ask.sequence):
            return f"place {ask.place} holds version {held.version}, not {ask.version}: it was used again"
        return "" if held.whole else f"version {ask.version} was released"

    def _answer(self, number: int, answer: BroadcastReply) -> None:
        self._line.set(answer_key(number), msgspec.json.encode(answer).decode())

    def _group_key(self) -> str:
        return self._group.key if self._group is not None else ""

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group, self._members = None, []

"""The controller's end of the channel: one ROUTER socket to all workers, on the event loop.

Every request has a deadline and fails at once when its peer dies. Events and heartbeats go to one callback, in the
order in which each peer sent them. A message that cannot be read is dropped and reported with its sender's name, and
the hub goes on. An error that ends one of the hub's own tasks is never lost: `failed` raises it.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio

from headrace.channel.codec import (
    MESSAGE_BYTES,
    PROTOCOL,
    Failure,
    Header,
    Kind,
    Message,
    pack,
    unpack_body,
    unpack_header,
)
from headrace.channel.heartbeats import BEAT_SECONDS, SILENCE_SECONDS, Alive, Hello
from headrace.errors import ChannelError, DeadlineError, PeerDied, one_line

M = TypeVar("M", bound=Message)

BAD_MESSAGES = 3
"""A worker of which this many messages were dropped is refused: it no longer works as it should."""


class Hub:
    """The controller's connection to all workers, which are addressed by name."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[str, Message], None],
        on_silence: Callable[[PeerDied], None] = lambda death: None,
        on_dropped: Callable[[str, str, bool], None] = lambda peer, reason, refused: None,
        *,
        names: Collection[str] | None = None,
        limit: int = MESSAGE_BYTES,
    ) -> None:
        """Bind the socket. `on_silence` is called, perhaps repeatedly, for a peer that is silent or unreachable.

        `on_dropped` is called with a sender's name, the reason why a message of it was dropped, and whether the sender
        is refused from now on. `names` are the peers that may connect; None stands for all. A message of more than
        `limit` bytes is dropped.
        """
        self.address = address
        self._on_message = on_message
        self._on_silence = on_silence
        self._on_dropped = on_dropped
        self._names = names
        self._limit = limit
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Message]]] = {}
        self._heard: dict[str, float] = {}
        self._dead: dict[str, PeerDied] = {}
        self.dropped: Counter[str] = Counter()
        """The number of messages that were dropped since each peer last said hello; "" counts those of strangers."""
        self._tasks: list[asyncio.Task[None]] = []
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()

    def start(self) -> None:
        """Start to receive messages and to send heartbeats."""
        self._tasks = [
            asyncio.create_task(self._receive_loop(), name="hub receive"),
            asyncio.create_task(self._beat_loop(), name="hub beat"),
        ]
        for task in self._tasks:
            self.watch(task)

    def watch(self, task: asyncio.Task[Any]) -> None:
        """Own a background task of the controller: if the task ends with an error, `failed` raises the error."""

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._failures.put_nowait(error)

        task.add_done_callback(ended)

    async def failed(self) -> None:
        """Wait until a task that this hub owns ends with an error, and raise that error. The caller owns this wait."""
        raise await self._failures.get()

    @property
    def peers(self) -> list[str]:
        """The workers that have said hello and are not known to be dead."""
        return [peer for peer in self._heard if peer not in self._dead]

    def _silent_for(self, peer: str) -> float:
        return time.monotonic() - self._heard.get(peer, time.monotonic())

    async def send(self, peer: str, message: Message) -> None:
        """Send a message without waiting for an answer. Messages to one peer stay in order."""
        await self._send(peer, "event", 0, message)

    async def request(self, peer: str, message: Message, reply: type[M], *, timeout: float) -> M:
        """Send a request and wait for its answer.

        Raises `DeadlineError` after `timeout` seconds, `PeerDied` if the peer dies, and `ChannelError` if the answer is
        an error or not a `reply`.
        """
        request_id = next(self._ids)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = (peer, future)
        try:
            await self._send(peer, "request", request_id, message)
            async with asyncio.timeout(timeout):
                answer = await future
        except TimeoutError as error:
            raise DeadlineError(f"{peer} did not answer {type(message).__name__} within {timeout:g} s") from error
        finally:
            del self._waiting[request_id]
        if not isinstance(answer, reply):
            raise ChannelError(f"{peer} answered {type(message).__name__} with a {type(answer).__name__}")
        return answer

    def mark_dead(self, death: PeerDied) -> None:
        """Fail every request to this peer, those that wait now and those that come later."""
        self._dead[death.peer] = death
        for peer, future in self._waiting.values():
            if peer == death.peer and not future.done():
                future.set_exception(death)

    def lost(self, peer: str) -> bool:
        """Return whether this peer is dead, or was heard once but not recently."""
        return peer in self._dead or self._silent_for(peer) > 3 * BEAT_SECONDS

    def forget(self, peer: str) -> None:
        """Accept a new process under a dead peer's name. Until this call, everything sent to that name fails."""
        self._dead.pop(peer, None)

    async def close(self) -> None:
        """Stop both loops and close the socket. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._socket.close()
        self._context.term()

    async def _send(self, peer: str, kind: Kind, request_id: int, message: Message) -> None:
        if peer in self._dead:
            raise self._dead[peer]
        try:
            await self._socket.send_multipart([peer.encode(), *pack(kind, request_id, message)], copy=False)
        except zmq.ZMQError as error:
            # The supervisor knows how the process ended. Its report, not this error, should fail the requests that
            # wait.
            self._on_silence(PeerDied(peer, f"unreachable ({error})"))

    async def _receive_loop(self) -> None:
        while True:
            identity, *frames = await self._socket.recv_multipart(copy=False)
            peer = bytes(identity.buffer).decode(errors="backslashreplace")
            if self._names is not None and peer not in self._names:
                self._drop("", f"{one_line(peer)!r} is not a worker of this run")
                continue
            try:
                message = self._read(peer, frames)
            except ChannelError as error:
                self._drop(peer, str(error))
                continue
            if message is not None:
                self._on_message(peer, message)

    def _read(self, peer: str, frames: Sequence[zmq.Frame]) -> Message | None:
        """Return the message, or None if it answered a request. Raises `ChannelError` if it cannot be read."""
        if (size := sum(map(len, frames))) > self._limit:
            raise ChannelError(f"a message of {size:,} bytes is over the limit of {self._limit:,}")
        header = unpack_header(frames)
        if peer not in self._heard and header.tag != Hello.__name__:
            raise ChannelError(f"a {header.tag} came before {Hello.__name__}")
        try:
            message = unpack_body(header, frames)
        except ChannelError as error:
            self._answer(peer, header, Failure(text=str(error)))
            raise
        if isinstance(message, Hello):
            self.dropped.pop(peer, None)
            if message.protocol != PROTOCOL:
                self.dropped[peer] = BAD_MESSAGES - 1  # It would misread all that follows.
                raise ChannelError(
                    f"it speaks protocol {message.protocol} and this controller speaks {PROTOCOL}; "
                    "both need the same version of Headrace"
                )
        self._heard[peer] = time.monotonic()
        if header.kind not in ("reply", "error"):
            return message
        self._answer(peer, header, message)
        return None

    def _answer(self, peer: str, header: Header, message: Message) -> None:
        """Hand an answer to the request that waits for it, if one does."""
        asked, future = self._waiting.get(header.id, (peer, None))
        if future is None or asked != peer or future.done():
            return  # The caller has given up; its deadline has already been reported.
        if isinstance(message, Failure):
            future.set_exception(ChannelError(f"{peer}: {message.text}"))
        else:
            future.set_result(message)

    def _drop(self, peer: str, reason: str) -> None:
        self.dropped[peer] += 1
        if self.dropped[peer] <= BAD_MESSAGES:
            self._on_dropped(peer or "a stranger", one_line(reason), bool(peer) and self.dropped[peer] == BAD_MESSAGES)

    async def _beat_loop(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for peer in self.peers:
                if self._silent_for(peer) > SILENCE_SECONDS:
                    death = PeerDied(peer, f"silent for {SILENCE_SECONDS:g} s")
                    self.mark_dead(death)
                    self._on_silence(death)
                else:
                    await self._send(peer, "event", 0, Alive())

"""The controller's end of the channel: one ROUTER socket to all workers, on the event loop.

Every request has a deadline and fails at once when its peer dies. Events and heartbeats go to one callback, in the
order in which each peer sent them.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

import zmq
import zmq.asyncio

from headrace.channel.codec import Failure, Kind, Message, pack, unpack
from headrace.channel.heartbeats import BEAT_SECONDS, SILENCE_SECONDS, Alive
from headrace.errors import ChannelError, DeadlineError, PeerDied

M = TypeVar("M", bound=Message)


class Hub:
    """The controller's connection to all workers, which are addressed by name."""

    def __init__(
        self,
        address: str,
        on_message: Callable[[str, Message], None],
        on_silence: Callable[[PeerDied], None] = lambda death: None,
    ) -> None:
        """Bind the socket. `on_silence` is called, perhaps repeatedly, for a peer that is silent or unreachable."""
        self.address = address
        self._on_message = on_message
        self._on_silence = on_silence
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
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start to receive messages and to send heartbeats."""
        self._tasks = [
            asyncio.create_task(self._receive_loop(), name="hub receive"),
            asyncio.create_task(self._beat_loop(), name="hub beat"),
        ]

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
            peer = bytes(identity.buffer).decode()
            self._heard[peer] = time.monotonic()
            header, message = unpack(frames)
            if header.kind not in ("reply", "error"):
                self._on_message(peer, message)
                continue
            _, future = self._waiting.get(header.id, (peer, None))
            if future is None or future.done():
                continue  # The caller has given up; its deadline has already been reported.
            if isinstance(message, Failure):
                future.set_exception(ChannelError(f"{peer}: {message.text}"))
            else:
                future.set_result(message)

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

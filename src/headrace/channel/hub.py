"""The controller's end of the channel: one ROUTER socket to all workers, on the event loop.

Every request has a deadline and fails at once when its peer dies. Events and heartbeats go to one callback, in the
order in which each peer sent them. A message that cannot be read is dropped and reported with its sender's name, and
the hub goes on. An error that ends one of the hub's own tasks is never lost: `failed` raises it.

A peer is the process that `expect` named last: its epoch is part of its identity, and an older process that comes back
is told to end. Beyond this host the link is encrypted (CURVE), and only the public keys given to `expect` may connect,
each as its own peer.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import zmq
import zmq.asyncio
from zmq.utils import z85

from headrace.channel.codec import (
    MESSAGE_BYTES,
    PROTOCOL,
    Failure,
    Frame,
    Header,
    Kind,
    Message,
    pack,
    unpack_body,
    unpack_header,
)
from headrace.channel.heartbeats import BEAT_SECONDS, SILENCE_SECONDS, Alive, Hello, Refused, identity
from headrace.channel.strangers import bear_strangers
from headrace.errors import ChannelError, DeadlineError, PeerDied, one_line

M = TypeVar("M", bound=Message)

BAD_MESSAGES = 3
"""A worker of which this many messages were dropped is refused: it no longer works as it should."""
_ZAP = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks whether the owner of a key may connect."""


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
        silence: float = SILENCE_SECONDS,
    ) -> None:
        """Bind the socket. `on_silence` is called, perhaps repeatedly, for a peer that is silent or unreachable.

        `on_dropped` is called with a sender's name, the reason why a message of it was dropped, and whether the sender
        is refused from now on. `names` are the peers that may connect; None stands for all. A message of more than
        `limit` bytes is dropped. A peer is silent after `silence` seconds. A `tcp://` address is always encrypted; its
        port may be `*`.
        """
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
        self._silence = silence
        self._epochs: dict[str, int] = {}
        self._keys: dict[bytes, str] = {}
        """Public key -> the identity of the process that may use it."""
        self.public_key = ""
        """The hub's own public key. Empty if the link is not encrypted."""
        self._zap: zmq.asyncio.Socket | None = self._encrypt() if address.startswith("tcp://") else None
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0") if self._zap else address
        """The address that workers connect to."""
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Message]]] = {}
        self._heard: dict[str, float] = {}
        self._dead: dict[str, PeerDied] = {}
        self.dropped: Counter[str] = Counter()
        """The number of messages that were dropped since each peer last said hello; "" counts those of strangers."""
        self._tasks: list[asyncio.Task[None]] = []
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()

    def _encrypt(self) -> zmq.asyncio.Socket:
        public, secret = zmq.curve_keypair()
        self.public_key = public.decode()
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"headrace")
        bear_strangers(self._socket, self._limit)
        # It must be bound before the hub: without it, ZeroMQ lets everybody in who knows the hub's public key.
        asked = self._context.socket(zmq.REP)
        asked.bind(_ZAP)
        return asked

    def start(self) -> None:
        """Start to receive messages and to send heartbeats."""
        self._tasks = [
            asyncio.create_task(self._receive_loop(), name="hub receive"),
            asyncio.create_task(self._beat_loop(), name="hub beat"),
        ]
        if self._zap is not None:
            self._tasks.append(asyncio.create_task(self._admit_loop(self._zap), name="hub admit"))
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

    def expect(self, peer: str, epoch: int, key: str = "") -> None:
        """From now on, this peer is the process of this epoch, with this public key. An older one is refused."""
        self._epochs[peer] = epoch
        for known in [known for known, name in self._keys.items() if name.partition("/")[0] == peer]:
            del self._keys[known]
        if key:
            self._keys[key.encode()] = identity(peer, epoch)

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
        if self._zap is not None:
            self._zap.close()
        self._context.term()

    async def _send(self, peer: str, kind: Kind, request_id: int, message: Message) -> None:
        if peer in self._dead:
            raise self._dead[peer]
        try:
            await self._send_to(identity(peer, self._epochs.get(peer, 0)), pack(kind, request_id, message))
        except zmq.ZMQError as error:
            # The supervisor knows how the process ended. Its report, not this error, should fail the requests that
            # wait.
            self._on_silence(PeerDied(peer, f"unreachable ({error})"))

    async def _send_to(self, process: str, frames: Sequence[Frame]) -> None:
        await self._socket.send_multipart([process.encode(), *frames], copy=False)

    async def _admit_loop(self, zap: zmq.asyncio.Socket) -> None:
        while True:
            version, request, _, _, _, mechanism, *credentials = await zap.recv_multipart()
            key = z85.encode(credentials[0]) if mechanism == b"CURVE" and len(credentials[0]) == 32 else b""
            known = self._keys.get(key, "").encode()
            # 300 closes the connection, and the other end may try again: the launcher may still be on its way with the
            # key. The hub finds `known` again in every message of the connection, as its user.
            await zap.send_multipart([version, request, b"200" if known else b"300", b"", known, b""])

    async def _receive_loop(self) -> None:
        while True:
            sender, *frames = await self._socket.recv_multipart(copy=False)
            process = bytes(sender.buffer).decode(errors="backslashreplace")
            peer, _, epoch = process.partition("/")
            if self._names is not None and peer not in self._names:
                self._drop("", f"{one_line(process)!r} is not a worker of this run")
                continue
            if self._zap is not None and (not frames or frames[-1].get("User-Id") != process):
                self._drop("", f"{one_line(process)!r} has the key of another worker")
                continue
            if epoch != str(self._epochs.get(peer, 0) or ""):
                await self._refuse(process)
                continue
            try:
                message = self._read(peer, frames)
            except ChannelError as error:
                self._drop(peer, str(error))
                continue
            if message is not None:
                self._on_message(peer, message)

    async def _refuse(self, process: str) -> None:
        """Tell a process in whose place another one was started to end."""
        self._drop("", f"{one_line(process)} was replaced, and came back")
        with contextlib.suppress(zmq.ZMQError):  # It is gone again.
            await self._send_to(process, pack("event", 0, Refused(reason="another process was started in its place")))

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
                if self._silent_for(peer) > self._silence:
                    death = PeerDied(peer, f"silent for {self._silence:g} s")
                    self.mark_dead(death)
                    self._on_silence(death)
                else:
                    await self._send(peer, "event", 0, Alive())

"""A worker's end of the channel: one DEALER socket in a thread of its own, with queues to the threads that compute.

The thread of the channel sends heartbeats, also while the computing threads are busy. If the controller is silent for
too long, it ends the process: nothing that the process computes can reach anyone. A thread that a worker cannot do
without is a `vital_thread`: an error in it ends the process with that reason, so that supervision sees the death.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import zmq

from headrace.channel.codec import PROTOCOL, Failure, Frame, Message, pack, unpack
from headrace.channel.heartbeats import (
    BEAT_SECONDS,
    SILENCE_SECONDS,
    Alive,
    Heartbeat,
    Hello,
    LogText,
    Ready,
    Refused,
    Welcome,
    identity,
)
from headrace.channel.vital import vital_thread
from headrace.observe.spans import SpanRecorder

CLOSE_SECONDS = 5.0
EXIT_ORPHAN = 3

logger = logging.getLogger(__name__)


class Incoming(msgspec.Struct, frozen=True):
    """A message from the controller. `request_id` is 0 when no answer is expected."""

    request_id: int
    message: Message


class LinkKeys(msgspec.Struct, frozen=True):
    """The keys of an encrypted link, encoded as Z85: the hub's public key, and the worker's own pair."""

    hub: bytes
    public: bytes
    secret: bytes

    @classmethod
    def made(cls, hub: str) -> Self:
        """Make a new pair for this worker."""
        return cls(hub.encode(), *zmq.curve_keypair())


class WorkerLink:
    """The link that every role of a worker uses. It is made from (name, address, run directory) alone.

    `neighbours` are the names of the workers that share this worker's GPU. `epoch` says how many processes of this name
    were started before. With `keys`, the link is encrypted. `run_dir` is None until `receive_welcome` if the worker has
    no run directory.

    `new_log_text` returns what was written to the log since its last call, to be sent to the controller; on the
    controller's host, nothing. `peak_memory` returns the peak GPU memory of this process in bytes. The thread of the
    channel calls both, at every heartbeat, so neither may wait for anything.

    `send`, `reply`, `fail` and `count_generated` may be called from any thread. `on_lost` is called when nothing was
    heard from the controller for too long, and again at every later heartbeat while the silence lasts, and when this
    process was replaced by another one. It runs in the thread of the channel, and so does `beat`: nothing is sent or
    received until they return.
    """

    def __init__(
        self,
        name: str,
        address: str,
        run_dir: Path | None,
        on_lost: Callable[[], None] = lambda: os._exit(EXIT_ORPHAN),
        *,
        neighbours: tuple[str, ...] = (),
        epoch: int = 0,
        own_address: str = "",
        keys: LinkKeys | None = None,
        new_log_text: Callable[[], str] = str,
        peak_memory: Callable[[], int] = int,
    ) -> None:
        self.name = name
        self.neighbours = neighbours
        self.own_address = own_address
        """The address at which other hosts reach this one. Empty on a run of one host."""
        self._new_log_text = new_log_text
        self._run_dir = run_dir
        self._identity = identity(name, epoch)
        self._keys = keys
        self._silence = SILENCE_SECONDS
        self.spans = SpanRecorder()
        self.phase = "starting"
        self._peak_memory = peak_memory
        self._generated = 0
        self._lock = threading.Lock()
        self._address = address
        self._on_lost = on_lost
        self._inbox: queue.Queue[Incoming] = queue.Queue()
        self._take: Callable[[Incoming], object] = self._inbox.put
        self._outgoing: deque[list[Frame]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._stopping = threading.Event()
        self._thread = vital_thread(self._run, name="channel")

    @property
    def has_files(self) -> bool:
        """Whether this host has the run directory, or what stands for it."""
        return self._run_dir is not None

    @property
    def run_dir(self) -> Path:
        """The run directory, or what stands for it on a host that does not have it."""
        assert self._run_dir is not None, "the welcome has not come yet"
        return self._run_dir

    def start(self) -> None:
        """Queue the first message, `Hello`, and start the thread, which connects and sends heartbeats.

        This returns at once, before the connection exists.
        """
        self.send(Hello(protocol=PROTOCOL, without_files=self._run_dir is None))
        self._thread.start()

    def receive_welcome(self, settle: Callable[[Welcome], Path]) -> Welcome:
        """Wait for the controller's `Welcome`. `settle` puts its files on this host and returns their directory.

        The wait ends with the process if the controller stays silent.
        """
        while (incoming := self.next_message()) is None or not isinstance(incoming.message, Welcome):
            pass
        self._silence = incoming.message.silence_seconds
        self._run_dir = settle(incoming.message)
        return incoming.message

    def ready(self, **facts: int | float | str) -> None:
        """Tell the controller that this role serves from now on."""
        self.phase = "ready"
        self.send(Ready(facts=facts))

    def count_generated(self, tokens: int) -> None:
        """Add to the number of tokens that the next heartbeat reports."""
        with self._lock:
            self._generated += tokens

    def next_message(self) -> Incoming | None:
        """Return the controller's next message, or None after half a second."""
        try:
            return self._inbox.get(timeout=0.5)
        except queue.Empty:
            return None

    def next_messages(self, gather: float = 0.0) -> list[Incoming]:
        """Return all messages that have arrived, so that they can be answered together; none after half a second.

        If there is one, further ones are gathered for `gather` seconds.
        """
        first = self.next_message()
        if first is None:
            return []
        if gather:
            time.sleep(gather)
        found = [first]
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._inbox.get_nowait())
        return found

    def pass_to(self, take: Callable[[Incoming], object] | None) -> None:
        """Pass the controller's messages to `take`, in the thread of the channel. With None, they wait in the inbox."""
        self._take = take or self._inbox.put
        while take is not None and not self._inbox.empty():
            take(self._inbox.get_nowait())

    def send(self, message: Message) -> None:
        """Send a message without waiting for an answer. Messages stay in order."""
        self._enqueue(pack("event", 0, message))

    def reply(self, incoming: Incoming, message: Message) -> None:
        """Answer a request."""
        self._enqueue(pack("reply", incoming.request_id, message))

    def fail(self, incoming: Incoming, text: str) -> None:
        """Answer a request with an error of one line."""
        self._enqueue(pack("error", incoming.request_id, Failure(text=text)))

    def beat(self) -> Heartbeat:
        """Make the next heartbeat."""
        with self._lock:
            generated, self._generated = self._generated, 0
        return Heartbeat(
            phase=self.phase,
            time=time.monotonic(),
            spans=self.spans.drain(),
            generated_tokens=generated,
            peak_memory_bytes=self._peak_memory(),
        )

    def close(self) -> None:
        """Make the thread send all queued messages and stop. Wait for that at most `CLOSE_SECONDS`. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._wake()
            if self._thread.is_alive():
                self._thread.join(CLOSE_SECONDS)

    def _enqueue(self, frames: list[Frame]) -> None:
        self._outgoing.append(frames)
        self._wake()

    def _wake(self) -> None:
        # If the pipe is full, the write fails, but the bytes in the pipe wake the thread all the same.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, self._identity.encode())
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        if self._keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.hub)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        socket.connect(self._address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        next_beat = heard = time.monotonic()
        while not self._stopping.is_set() or self._outgoing:
            ready = dict(poller.poll(int(max(0.0, next_beat - time.monotonic()) * 1000)))
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            while self._outgoing:
                socket.send_multipart(self._outgoing.popleft(), copy=False)
            if socket in ready:
                heard = time.monotonic()
                while socket.poll(0):
                    header, message = unpack(socket.recv_multipart(copy=False))
                    if isinstance(message, Refused):
                        logger.warning("this process ends: %s", message.reason)
                        self._on_lost()
                    elif not isinstance(message, Alive):
                        self._take(Incoming(header.id, message))
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                socket.send_multipart(pack("event", 0, self.beat()), copy=False)
                self._send_log(socket)
                if time.monotonic() - heard > self._silence:
                    self._on_lost()
        self._send_log(socket)
        socket.close()
        context.term()

    def _send_log(self, socket: zmq.Socket[bytes]) -> None:
        if text := self._new_log_text():
            socket.send_multipart(pack("event", 0, LogText(text=text)), copy=False)

"""A child process of a benchmark, and the connection to it: messages of the channel's codec over a pair of sockets.

The child ends when the connection is closed, so it never outlives the benchmark. Every wait for an answer has a
deadline.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import connection as pipes
from typing import TypeVar

import msgspec

from headrace.channel.codec import Frame, decode, encode
from headrace.errors import HeadraceError

T = TypeVar("T", bound=msgspec.Struct)

IDLE_SECONDS = 3600.0
"""How long a child waits for its next message."""
CLOSE_SECONDS = 30.0
_END_SECONDS = 5.0
"""How long to wait for a process to end after its connection was closed, to learn its exit code."""


class Ready(msgspec.Struct, kw_only=True):
    """The answer of a child that has done what the message asked for."""


class Connection:
    """One end of the connection. One thread may receive while another thread sends."""

    def __init__(self, descriptor: int) -> None:
        self._connection = pipes.Connection(descriptor)

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        frames = encode(message)
        self._connection.send_bytes(len(frames).to_bytes(4, "little"))
        for frame in frames:
            self._connection.send_bytes(frame)

    def receive(self, kind: type[T], deadline: float = IDLE_SECONDS) -> T:
        """Return the next message, which must be of this kind.

        Raises `EOFError` once the other end is closed, and `HeadraceError` after `deadline` seconds.
        """
        if not self._connection.poll(deadline):
            raise HeadraceError(f"a process of the benchmark did not answer within {deadline:g} s")
        count = int.from_bytes(self._connection.recv_bytes(), "little")
        frames: list[Frame] = [self._connection.recv_bytes() for _ in range(count)]
        return decode(kind, frames)

    def close(self) -> None:
        """Close this end. The other end then gets an `EOFError`. Idempotent."""
        self._connection.close()


class Side:
    """A child process `python -m MODULE DESCRIPTOR`, and our end of the connection to it."""

    def __init__(self, module: str, *, deadline: float, environment: Mapping[str, str] | None = None) -> None:
        """Start the child. It gets the environment of this process and the variables of `environment`.

        Every answer must arrive within `deadline` seconds.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, **(environment or {})}
            )
        self._line = Connection(ours.detach())
        self._deadline = deadline

    def ask(self, message: msgspec.Struct, answer: type[T]) -> T:
        """Send a message, wait for its answer, and return the answer."""
        self.tell(message)
        return self.answer(answer)

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message. Call `answer` later to get its answer."""
        try:
            self._line.send(message)
        except OSError as error:
            raise self._ended() from error

    def answer(self, kind: type[T]) -> T:
        """Return the answer to the oldest message that has none yet. Raises `HeadraceError` if the child has ended."""
        try:
            return self._line.receive(kind, self._deadline)
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def close(self) -> None:
        """Close the connection, and wait for the child to end. Kill it after `CLOSE_SECONDS`. Idempotent."""
        self._line.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> HeadraceError:
        try:
            code: int | None = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        return HeadraceError(f"a process of the benchmark ended early (exit code {code}): it says why above")

"""A process beside a benchmark's own, and the line to it: messages of the channel's codec over a pair of sockets.

It ends when the line is closed, so it never outlives the benchmark, and no answer is waited for without a deadline.
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

CLOSE_SECONDS = 30.0
_END_SECONDS = 5.0
"""For a process to end after its line did."""


class Connection:
    """One end of the line. One thread may receive while another one sends."""

    def __init__(self, descriptor: int) -> None:
        self._connection = pipes.Connection(descriptor)

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        frames = encode(message)
        self._connection.send_bytes(len(frames).to_bytes(4, "little"))
        for frame in frames:
            self._connection.send_bytes(frame)

    def receive(self, kind: type[T], deadline: float) -> T:
        """The next message, which must be of this kind. Raises `EOFError` once the other end is closed."""
        if not self._connection.poll(deadline):
            raise HeadraceError(f"a process of the benchmark did not answer within {deadline:g} s")
        count = int.from_bytes(self._connection.recv_bytes(), "little")
        frames: list[Frame] = [self._connection.recv_bytes() for _ in range(count)]
        return decode(kind, frames)

    def close(self) -> None:
        """Close this end; the other one sees it. Idempotent."""
        self._connection.close()


class Side:
    """`python -m MODULE DESCRIPTOR ARGUMENTS` as a child, and our end of the line to it."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is added to ours."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, str(theirs.fileno()), *arguments]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, **(environment or {})}
            )
        self._line = Connection(ours.detach())

    def ask(self, message: msgspec.Struct, answer: type[T], deadline: float) -> T:
        """Send a message and wait for its answer."""
        self.tell(message)
        return self.answer(answer, deadline)

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message, whose answer is waited for later."""
        try:
            self._line.send(message)
        except OSError as error:
            raise self._ended() from error

    def answer(self, kind: type[T], deadline: float) -> T:
        """The answer to the oldest message that has none yet."""
        try:
            return self._line.receive(kind, deadline)
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def close(self) -> None:
        """End the process. Idempotent."""
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

"""The worker's side of a `WorkerPool`: a process that runs foreign code and answers its owner over private pipes.

The worker starts from its first frame alone. It ends when its owner ends, even in the middle of a question. What
foreign code prints never reaches the pipes, and every process that it starts ends with the worker: `MARK` finds such a
process in any session.

A frame is an id, a length, and a JSON body. An answer carries the id of its question, and only the worker itself can
answer, not a fork of it. The body is JSON and not msgpack, because msgpack integers end at 64 bits: a frame can hold
every value that a line of a JSON dataset can hold.
"""

import contextlib
import ctypes
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, TypeVar

import msgspec

from headrace.channel.vital import vital_thread
from headrace.errors import ConfigError, one_line

HEADER = struct.Struct("<QI")
"""The header of a frame: the id of the question, and the length of the body."""
GREETING = 0
"""The id of the first frame to a worker, and of the `WorkerReady` that answers it. Questions count from 1."""
GRACE_SECONDS = 2.0
"""Seconds that a worker has to end by itself after its owner closed the pipe or died."""
ANSWER_BYTES = 1 << 26
"""The longest answer. The question of a longer answer fails."""
MARK = "HEADRACE_WORKER_OF"
"""This environment variable of a worker, and of all processes that it starts, names the worker's owner and number."""

T = TypeVar("T")
S = TypeVar("S")


class WorkerReady(msgspec.Struct, kw_only=True):
    """The first frame from a worker: the worker is ready, or `error` says why it never will be."""

    error: str = ""


def pack(id: int, body: bytes) -> bytes:
    """Make a frame. A frame with an empty body cancels its question: nobody waits for that answer any more."""
    return HEADER.pack(id, len(body)) + body


def read(stream: BinaryIO) -> tuple[int, bytes] | None:
    """Read the next frame of a blocking stream: its id and body, or None at the end of the stream."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    id, length = HEADER.unpack(header)
    body = stream.read(length)
    return (id, body) if len(body) == length else None


class Owner:
    """The owner of this process. It asks questions; answers may be sent to it from any thread."""

    def __init__(self) -> None:
        """Move the two pipes away from descriptors 0 and 1, so that `print` and `input` cannot touch them."""
        self._asking, self._answering = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        self._turn = threading.Lock()
        self._process = os.getpid()

    def greet(self, setup: type[S], make: Callable[[S], T]) -> T | None:
        """Make the object that the first frame describes, and greet the owner.

        Returns None if the object cannot be made, or the owner is gone: the worker should then end.
        """
        first = read(self._asking)
        if first is None:
            return None
        try:
            made = make(msgspec.json.decode(first[1], type=setup))
        except ConfigError as error:
            self.answer(GREETING, WorkerReady(error=str(error)))
            return None
        self.answer(GREETING, WorkerReady())
        return made

    def questions(self, kind: type[T]) -> Iterator[tuple[int, T | None]]:
        """Yield questions with their ids until the owner closes the pipe.

        None stands for a question that is given up.
        """
        asked: SimpleQueue[tuple[int, bytes] | None] = SimpleQueue()
        vital_thread(self._listen, asked, name="questions").start()
        while (frame := asked.get()) is not None:
            id, body = frame
            yield id, msgspec.json.decode(body, type=kind) if body else None

    def answer(self, id: int, message: msgspec.Struct) -> None:
        """Answer a question. An answer that is too long, or cannot be encoded, is replaced by its `error`."""
        if os.getpid() != self._process:
            os._exit(0)  # Foreign code has forked, and this is the copy. The question is the worker's own.
        try:
            body = msgspec.json.encode(message)
            problem = f"the answer of {len(body):,} bytes is over the limit of {ANSWER_BYTES:,}"
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            body, problem = b"", f"the answer cannot be sent: {one_line(str(error))}"
        if not body or len(body) > ANSWER_BYTES:
            body = msgspec.json.encode({"error": problem})
        # The owner may be gone already. The end of the other pipe then ends this worker.
        with self._turn, contextlib.suppress(BrokenPipeError):
            self._answering.write(pack(id, body))
            self._answering.flush()

    def _listen(self, asked: SimpleQueue[tuple[int, bytes] | None]) -> None:
        """Pass questions on. At the end of the pipe, ask the worker to end, and kill it if it does not."""
        while (frame := read(self._asking)) is not None:
            asked.put(frame)
        asked.put(None)
        time.sleep(GRACE_SECONDS)
        if mark := os.environ.get(MARK):
            end_marked(mark)
        os.killpg(os.getpgrp(), signal.SIGKILL)


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends. Only Linux can do this.

    `Owner` ends its process everywhere, but not while a function holds the interpreter's lock.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def end_descendants() -> None:
    """End processes that foreign code started and left behind. They share this worker's process group."""
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(os.getpgrp(), signal.SIGTERM)


def owner_mark() -> str:
    """Return the part of a mark that names this process. It differs from that of a later process of the same id."""
    return f"{os.getpid()}.{_started(os.getpid())}"


def end_marked(mark: str) -> None:
    """Kill all processes with this mark, in any session, except this one."""
    # A process may fork while it is looked for, so the last look must find nothing. It need not be looked for forever.
    for _ in range(10):
        found = [pid for pid, other in _marked() if other == mark and pid != os.getpid()]
        if not found:
            return
        _kill(found)


def sweep_marked() -> None:
    """Kill what workers of owners that are gone left behind: an owner that is killed cannot end it."""
    _kill([pid for pid, mark in _marked() if mark.split(".")[1:2] != [_started(mark.partition(".")[0])]])


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _marked() -> Iterator[tuple[int, str]]:
    """Yield the processes that have a mark, with it. Without `/proc` there are none."""
    start = f"{MARK}=".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for variable in (process / "environ").read_bytes().split(b"\0"):
                if variable.startswith(start):
                    yield int(process.name), variable.removeprefix(start).decode(errors="replace")


def _started(pid: int | str) -> str:
    """Return when a process started, in ticks of the system; empty if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""

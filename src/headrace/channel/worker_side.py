"""The worker's side of a `WorkerPool`: a process that runs foreign code and answers its owner over private pipes.

The worker starts from its first frame alone. It ends when its owner ends, even in the middle of a question. What
foreign code prints never reaches the pipes, and every process that it starts ends with the worker.

A frame is an id, a length, and a JSON body. An answer carries the id of its question. The body is JSON and not msgpack,
because msgpack integers end at 64 bits: a frame can hold every value that a line of a JSON dataset can hold.
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
from queue import SimpleQueue
from typing import BinaryIO, TypeVar

import msgspec

from headrace.errors import ConfigError

HEADER = struct.Struct("<QI")
"""The header of a frame: the id of the question, and the length of the body."""
GREETING = 0
"""The id of the first frame to a worker, and of the `WorkerReady` that answers it. Questions count from 1."""
GRACE_SECONDS = 2.0
"""Seconds that a worker has to end by itself after its owner closed the pipe or died."""

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
        threading.Thread(target=self._listen, args=(asked,), daemon=True).start()
        while (frame := asked.get()) is not None:
            id, body = frame
            yield id, msgspec.json.decode(body, type=kind) if body else None

    def answer(self, id: int, message: msgspec.Struct) -> None:
        """Answer a question."""
        # The owner may be gone already. The end of the other pipe then ends this worker.
        with self._turn, contextlib.suppress(BrokenPipeError):
            self._answering.write(pack(id, msgspec.json.encode(message)))
            self._answering.flush()

    def _listen(self, asked: SimpleQueue[tuple[int, bytes] | None]) -> None:
        """Pass questions on. At the end of the pipe, ask the worker to end, and kill it if it does not."""
        while (frame := read(self._asking)) is not None:
            asked.put(frame)
        asked.put(None)
        time.sleep(GRACE_SECONDS)
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

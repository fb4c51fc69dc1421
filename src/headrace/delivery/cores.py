"""Work on host memory that the cores share: a trainer's next step waits for it, or an engine's next token.

Every piece is taken by exactly one thread, and all are done on return. No torch here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 4
"""A few read and write as fast as the memory of most hosts allows; more would only take cores from others."""

_Piece = TypeVar("_Piece")


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_here() -> int:
    """How many threads share a moment of work in this process."""
    return min(MOST_THREADS, cores())


def share(work: Callable[[Iterator[_Piece]], None], pieces: Sequence[_Piece], threads: int, name: str) -> None:
    """Let so many threads, the caller's among them, work on the pieces; what one raises is raised here."""
    # One iterator for all: a thread whose core is busy with other work takes fewer.
    shared = iter(pieces)
    if threads <= 1 or len(pieces) <= 1:
        work(shared)
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix=name) as pool:
        others = [pool.submit(work, shared) for _ in range(threads - 1)]
        work(shared)
    for other in others:
        other.result()

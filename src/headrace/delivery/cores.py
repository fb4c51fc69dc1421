"""Short work on host memory is split into pieces that several threads share, because a trainer or an engine waits.

Exactly one thread takes each piece, and all pieces are done on return. This module does not import torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

MOST_THREADS = 4
"""The most threads to use. A few threads reach the memory bandwidth of most hosts; more only take cores from others."""

_Piece = TypeVar("_Piece")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_here() -> int:
    """Return the number of threads that share a short piece of work in this process."""
    return min(MOST_THREADS, cores())


def share(work: Callable[[Iterator[_Piece]], None], pieces: Sequence[_Piece], threads: int, name: str) -> None:
    """Run `work` on the pieces in `threads` threads, one of them the caller's; an exception in any is raised here."""
    # All threads share one iterator, so that a thread whose core is busy takes fewer pieces.
    shared = iter(pieces)
    if threads <= 1 or len(pieces) <= 1:
        work(shared)
        return
    with ThreadPoolExecutor(threads - 1, thread_name_prefix=name) as pool:
        others = [pool.submit(work, shared) for _ in range(threads - 1)]
        work(shared)
    for other in others:
        other.result()

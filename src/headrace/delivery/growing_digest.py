"""The digest of packed weights while they arrive: what is here is summed beside the fetching of the rest.

Every word is read once, where it came to lie, after it came; the number is the one that `digest` gives for the whole.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch

from headrace.delivery.base import Entry
from headrace.delivery.cores import threads_here
from headrace.delivery.digest import SPAN, Piece, add_pieces, borrowed, count_sums, fold, name_key
from headrace.delivery.plan import dtype_name


class GrowingDigest:
    """Of tensors in one packed buffer, which fills from its beginning. Used by one thread; close it in the end."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._sums = np.zeros(0, np.int32)
        self._coming: deque[tuple[int, int, torch.Tensor, int]] = deque()
        self._here: SimpleQueue[Piece | None] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._working: list[Future[None]] = []

    @property
    def begun(self) -> bool:
        """Whether anybody has told of anything that came."""
        return self._pool is not None

    def grown(self, weights: Mapping[str, torch.Tensor], nbytes: int) -> None:
        """So many of the packed bytes are here and change no more; `weights` are views of all, and always the same."""
        if self._pool is None:
            self._begin(weights)
        while self._coming and self._coming[0][0] <= nbytes:
            _, place, run, first = self._coming.popleft()
            # Not before it is here: a run of odd length is copied.
            self._here.put((place, borrowed(run), first))

    def value(self) -> int:
        """The digest, once all is here; this thread works with the others on what they have not got to."""
        assert self.begun and not self._coming
        self._end()
        add_pieces(self._sums, iter(self._here.get, None))
        for one in self._working:
            one.result()
        keys = [name_key(entry.name, entry.dtype) for entry in self._entries]
        return fold(keys, [count_sums(entry.nbytes) for entry in self._entries], self._sums)

    def close(self) -> None:
        """Let go of the weights. Idempotent."""
        if self._pool is not None:
            self._coming.clear()
            self._end()
            self._pool.shutdown(wait=True)
            self._working.clear()

    def _begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        places = itertools.accumulate((count_sums(entry.nbytes) for entry in self._entries), initial=0)
        for place, entry in zip(places, self._entries, strict=False):
            flat, size = weights[entry.name].detach().view(-1), weights[entry.name].element_size()
            assert dtype_name(flat.dtype) == entry.dtype
            for first in range(0, flat.numel(), 4 * SPAN // size):
                run = flat[first : first + 4 * SPAN // size]
                self._coming.append((entry.offset + first * size + run.nbytes, place, run, first * size // 4))
        self._coming = deque(sorted(self._coming, key=lambda run: run[0]))
        self._sums = np.zeros(sum(count_sums(entry.nbytes) for entry in self._entries), np.int32)
        helpers = max(1, threads_here() - 1)
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="digest")
        work = functools.partial(add_pieces, self._sums)
        self._working = [self._pool.submit(work, iter(self._here.get, None)) for _ in range(helpers)]

    def _end(self) -> None:
        """One sign for every helper, and one for the caller."""
        for _ in range(len(self._working) + 1):
            self._here.put(None)

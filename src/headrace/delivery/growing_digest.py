"""A digest of packed weights that is computed while they arrive, beside the fetching of the rest.

A word is read only after it has arrived, and where it arrived. The result equals that of `digest` for the whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import torch

from headrace.delivery.base import Entry
from headrace.delivery.cores import threads_here
from headrace.delivery.digest_factors import fold
from headrace.delivery.digest_layout import DigestLayout, DigestPiece, layout_of, where

_Numbered = tuple[int, DigestPiece]


class GrowingDigest:
    """The digest of tensors in one packed buffer that fills from its beginning.

    Used by one thread, which must close it; helper threads do part of the work.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._layout: DigestLayout | None = None
        self._base = 0
        self._held: Mapping[str, torch.Tensor] = {}
        self._found: list[torch.Tensor] = []
        self._coming: deque[_Numbered] = deque()
        self._here: SimpleQueue[_Numbered | None] = SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._working: list[Future[None]] = []

    @property
    def begun(self) -> bool:
        """Whether `grown` was called at least once."""
        return self._layout is not None

    def grown(self, weights: Mapping[str, torch.Tensor], nbytes: int) -> None:
        """Report that the first `nbytes` packed bytes have arrived and do not change any more.

        `weights` are views of the whole buffer; every call must pass the same views.
        """
        if self._layout is None:
            self._begin(weights)
        while self._coming and self._coming[0][1].end - self._base <= nbytes:
            self._here.put(self._coming.popleft())

    def value(self) -> int:
        """Return the digest after all bytes have arrived; the calling thread helps with the remaining pieces."""
        assert self._layout is not None and not self._coming
        self._end()
        self._take()
        for one in self._working:
            one.result()
        return fold(self._layout.joined(self._found), self._layout.keys)

    def close(self) -> None:
        """End the helper threads and release the weights. Idempotent."""
        if self._pool is not None:
            self._end()
            self._pool.shutdown(wait=True)
            self._pool = None
            self._held = {}

    def _begin(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._held = weights
        self._base = min(weights[entry.name].data_ptr() - entry.offset for entry in self._entries if entry.nbytes)
        self._layout = layout_of(tuple(where(entry.name, weights[entry.name]) for entry in self._entries))
        numbered = enumerate(self._layout.pieces)
        self._coming = deque(sorted(numbered, key=lambda piece: piece[1].end))
        self._found = [torch.empty(0, dtype=torch.int32)] * len(self._coming)
        helpers = max(1, threads_here() - 1)
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix="digest")
        self._working = [self._pool.submit(self._take) for _ in range(helpers)]

    def _take(self) -> None:
        here: Iterator[_Numbered] = iter(self._here.get, None)
        for number, piece in here:
            self._found[number] = piece.sums()

    def _end(self) -> None:
        """Put one end marker into the queue for every helper thread, and one for the caller."""
        for _ in range(len(self._working) + 1):
            self._here.put(None)

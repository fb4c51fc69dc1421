"""The saved turns of an episode of a previous process, in order, with the context between them.

A saved token is used only if everything before it is unchanged. Otherwise the token is counted as discarded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.types import NO_VERSION, Int32Array, Trace


class SavedTurns:
    """The saved turns, handed out one by one as long as the episode meets the same context that was saved."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        """Only a single trace can be continued. If there are several, all tokens are discarded."""
        only = traces[0] if len(traces) == 1 else None
        self._left = only if only is not None and len(only) else None
        """The tokens that are not handed out yet. A token with a version was sampled, whether it is trained or salvaged
        context."""
        self.discarded = sum(_sampled(trace) for trace in traces) if len(traces) > 1 else 0
        """The number of sampled tokens that could not be used."""

    def expect(self, context: Int32Array) -> None:
        """Compare the next saved tokens with this context, which nobody sampled. If they differ, discard the rest."""
        if self._left is None:
            return
        n = len(context)
        sampled = self._left.versions != NO_VERSION
        same = len(self._left) >= n and not sampled[:n].any()
        # If the saved context is longer than this one, it is a different context.
        same = same and (len(self._left) == n or bool(sampled[n]))
        if same and np.array_equal(self._left.token_ids[:n], context):
            self._drop(n)
        else:
            self.discard()

    def next_turn(self) -> tuple[Trace | None, bool]:
        """Return the next sampled tokens, or None if none are left, and whether their turn is known to have ended."""
        if self._left is None:
            return None, False
        ends = np.flatnonzero(self._left.versions == NO_VERSION)
        n = int(ends[0]) if len(ends) else len(self._left)
        turn, whole = self._left.part(0, n), n < len(self._left)
        self._drop(n)
        return turn, whole

    def discard(self) -> None:
        """Discard the rest, which cannot be used."""
        left, self._left = self._left, None
        if left is not None:
            self.discarded += _sampled(left)

    def _drop(self, n: int) -> None:
        assert self._left is not None
        self._left = self._left.part(n, len(self._left)) if len(self._left) > n else None


def _sampled(trace: Trace) -> int:
    return int((trace.versions != NO_VERSION).sum())

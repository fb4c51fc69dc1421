"""What an episode had come to in a previous process: its turns, in order, and what came between them.

A saved token is used where everything before it is as it was, and counted as discarded otherwise; never both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.types import NO_VERSION, Int32Array, Trace


class SavedTurns:
    """Gives turns back one by one, while the context that is met is the one that was saved."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        """Only a single trace can be continued: of several, everything is discarded."""
        only = traces[0] if len(traces) == 1 else None
        self._left = only if only is not None and len(only) else None
        """A token with a version was sampled, whether it is trained or was salvaged as context."""
        self.discarded = sum(_sampled(trace) for trace in traces) if len(traces) > 1 else 0
        """Sampled tokens that were of no use."""

    def expect(self, context: Int32Array) -> None:
        """These tokens, which nobody sampled, come next; if others were saved here, what follows them is discarded."""
        if self._left is None:
            return
        n = len(context)
        sampled = self._left.versions != NO_VERSION
        same = len(self._left) >= n and not sampled[:n].any()
        # A context that goes on where this one ends is another one.
        same = same and (len(self._left) == n or bool(sampled[n]))
        if same and np.array_equal(self._left.token_ids[:n], context):
            self._drop(n)
        else:
            self.discard()

    def next_turn(self) -> tuple[Trace | None, bool]:
        """The sampled tokens that come next, if any are left, and whether their turn is known to have ended."""
        if self._left is None:
            return None, False
        ends = np.flatnonzero(self._left.versions == NO_VERSION)
        n = int(ends[0]) if len(ends) else len(self._left)
        turn, whole = self._left.part(0, n), n < len(self._left)
        self._drop(n)
        return turn, whole

    def discard(self) -> None:
        """What is left is of no use."""
        left, self._left = self._left, None
        if left is not None:
            self.discarded += _sampled(left)

    def _drop(self, n: int) -> None:
        assert self._left is not None
        self._left = self._left.part(n, len(self._left)) if len(self._left) > n else None


def _sampled(trace: Trace) -> int:
    return int((trace.versions != NO_VERSION).sum())

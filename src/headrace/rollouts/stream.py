"""The token stream of an episode, and the saved turns that it continues from.

The stream only grows, and tokens in it never change. Deltas arrive a few tokens at a time and episodes may be long, so
parts are kept as they arrived and joined on demand.
"""

from collections.abc import Sequence

import numpy as np

from headrace.errors import ChannelError
from headrace.types import NO_VERSION, Float32Array, Int16Array, Int32Array, Kept, Trace


class TokenStream:
    """A `Trace` under construction."""

    def __init__(self) -> None:
        self._joined = Trace.of_context(np.zeros(0, np.int32))
        self._parts: list[Trace] = []
        self._length = 0
        self.sampled = 0
        """The number of tokens that the policy sampled."""

    def __len__(self) -> int:
        return self._length

    def append_context(self, token_ids: Int32Array) -> Trace:
        """Append tokens that nobody sampled. Like the other two append methods, return the appended tokens."""
        return self._append(Trace.of_context(np.array(token_ids, np.int32)))

    def append_recorded(self, trace: Trace) -> Trace:
        """Append tokens of an earlier attempt or process, with their records. Sampled tokens count as sampled."""
        self.sampled += _sampled(trace)
        return self._append(trace)

    def append_sampled(
        self,
        token_ids: Int32Array,
        logprobs: Float32Array,
        versions: Int32Array,
        kept: Kept | None = None,
        routing: Int16Array | None = None,
        *,
        temperature: float = 0.0,
    ) -> Trace:
        """Append tokens that the policy sampled, with copies of the engine's records (views of a message).

        `temperature` is that of the recorded log-probabilities; 0 if it is not known.
        """
        n = len(token_ids)
        if not n == len(logprobs) == len(versions):
            raise ChannelError(f"{n} tokens came with {len(logprobs)} log-probabilities and {len(versions)} versions")
        if kept is not None:
            if len(kept.counts) != n or kept.counts.sum() != len(kept.token_ids):
                raise ChannelError(f"{n} tokens came with kept sets for {len(kept.counts)}, or torn ones")
            kept = Kept(counts=np.array(kept.counts, np.int32), token_ids=np.array(kept.token_ids, np.int32))
        if routing is not None and len(routing) != n:
            raise ChannelError(f"{n} tokens came with the experts of {len(routing)}")
        self.sampled += n
        return self._append(
            Trace(
                token_ids=np.array(token_ids, np.int32),
                trained=np.ones(n, np.bool_),
                logprobs=np.array(logprobs, np.float32),
                versions=np.array(versions, np.int32),
                kept=kept,
                routing=None if routing is None else np.array(routing, np.int16),
                temperatures=[(n, temperature)] if n else [],
            )
        )

    def trace(self) -> Trace:
        """Return all tokens so far. The returned arrays are not written to again."""
        if self._parts:
            self._joined = Trace.joined([self._joined, *self._parts])
            self._parts = []
        return self._joined

    def since(self, start: int) -> Trace | None:
        """Return the tokens after the first `start`; None if there are none, or if no token was sampled yet.

        This is cheap if there are few such tokens.
        """
        if start >= self._length or not self.sampled:
            return None
        known = len(self._joined)
        if start == 0:
            return self.trace()
        if start < known:
            return self.trace().part(start, self._length)
        late: list[Trace] = []
        for part in self._parts:
            if known + len(part) > start:
                late.append(part if known >= start else part.part(start - known, len(part)))
            known += len(part)
        return Trace.joined(late)

    def _append(self, part: Trace) -> Trace:
        if len(part):
            self._parts.append(part)
            self._length += len(part)
        return part


class SavedTurns:
    """The saved turns of an episode of a previous process, in order, with the context between them.

    They are handed out one by one. A saved token is used only if everything before it is unchanged. Otherwise the token
    is counted as discarded.
    """

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
            self.discarded += _sampled(self._left)
            self._left = None

    def next_turn(self) -> tuple[Trace | None, bool]:
        """Return the next sampled tokens, or None if none are left, and whether their turn is known to have ended."""
        if self._left is None:
            return None, False
        ends = np.flatnonzero(self._left.versions == NO_VERSION)
        n = int(ends[0]) if len(ends) else len(self._left)
        turn, whole = self._left.part(0, n), n < len(self._left)
        self._drop(n)
        return turn, whole

    def _drop(self, n: int) -> None:
        assert self._left is not None
        self._left = self._left.part(n, len(self._left)) if len(self._left) > n else None


def _sampled(trace: Trace) -> int:
    return int((trace.versions != NO_VERSION).sum())

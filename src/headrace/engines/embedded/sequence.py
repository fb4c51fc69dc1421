"""One request on its way through the engine: its tokens so far, how many of them the cache holds, and what was sent.

The records of a sampled token (log-probability, version, what was kept, experts) are written once, when it becomes
known, and survive preemption and a swap of weights.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from headrace.engines.base import Delta, FinishReason, Request
from headrace.engines.embedded.prefix_cache import Chain
from headrace.types import NO_VERSION, Float32Array, Int16Array, Int32Array, Kept

PrefixKey = tuple[str, bytes]
"""A group and the prompt that its requests share."""


@dataclass(frozen=True)
class Ending:
    """How a sequence ended, and with how many of the tokens that were just drawn."""

    finish: FinishReason
    tokens: int = 0
    error: str = ""
    version: int = NO_VERSION
    """Under which the token was drawn that ended it."""


class Sequence:
    """A request, the tokens sampled for it, and its place in the cache."""

    def __init__(self, request: Request, order: int) -> None:
        prompt = np.asarray(request.token_ids, np.int32)
        self.request = request
        self.id = request.id
        self.sampling = request.sampling
        self.rank = (request.priority, order)
        """Lower is served first and preempted last."""
        self.prompt_length = len(prompt)
        self.limit = len(prompt) + request.sampling.max_tokens
        """Tokens that it never has more of."""
        self.tokens: list[int] = prompt.tolist()
        """The prompt and everything sampled, as far as it is known."""
        # All but the last prompt token can be shared: that one gives the logits of the first sampled token.
        shareable = bool(request.group) and len(prompt) > 1
        self.key: PrefixKey | None = (request.group, prompt.tobytes()) if shareable else None

        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose keys and values are in the cache."""
        self.kv_version = NO_VERSION
        """The version under which its keys and values were begun."""
        self.pure = 0
        """How many of its first tokens were computed under `kv_version`."""
        self.chain: Chain | None = None
        self.cached = 0
        """How many of its first blocks the prefix cache was told of."""

        self.row: int | None = None
        """Its row in the state on a device; owned by the runner there."""
        self.in_flight = 0
        """Tokens that are being sampled for it and not known yet; kept by whoever launches the passes."""

        self.ending: Ending | None = None
        """How it ended, if its last tokens are still held back."""
        self.flushed_at: float | None = None
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._kept: list[Int32Array] = []
        self._routing: list[Int16Array] = []
        self._sent = 0

    @property
    def sampled(self) -> int:
        """How many tokens were sampled so far."""
        return len(self._logprobs)

    @property
    def unsent(self) -> int:
        """How many sampled tokens no delta holds yet."""
        return len(self._logprobs) - self._sent

    def sampled_under(self, version: int) -> int:
        """How many of its last tokens were sampled under this version, which is the newest."""
        count = 0
        while count < len(self._versions) and self._versions[-1 - count] == version:
            count += 1
        return count

    def append(
        self,
        token: int,
        logprob: float,
        version: int,
        *,
        kept: Int32Array | None = None,
        routing: Int16Array | None = None,
    ) -> None:
        """Record a sampled token; see `extend`."""
        self.extend(
            [token],
            [logprob],
            [version],
            kept=None if kept is None else [kept],
            routing=None if routing is None else [routing],
        )

    def extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        versions: list[int],
        *,
        kept: Seq[Int32Array] | None = None,
        routing: Seq[Int16Array] | None = None,
    ) -> None:
        """Record sampled tokens, each of a pass under its version that also computed the token before it.

        `kept` (ascending ids) and `routing` ([layers, k]) are given for every token of a sequence or for none; the
        arrays are not copied.
        """
        last = len(self.tokens) + len(tokens) - 1
        if tokens and last > self.computed and versions[0] == versions[-1]:
            self.cover(last, versions[0])
        else:
            for end, version in enumerate(versions, len(self.tokens)):
                if end > self.computed:
                    self.cover(end, version)
        self.tokens += tokens
        self._logprobs += logprobs
        self._versions += versions
        self._check(self._versions)
        if kept is not None or self._kept:
            self._kept += kept or ()
            self._check(self._kept)
        if routing is not None or self._routing:
            self._routing += routing or ()
            self._check(self._routing)

    def _check(self, records: Seq[object]) -> None:
        if len(records) != len(self._logprobs):
            raise RuntimeError(f"sequence {self.id}: {len(records)} records of {len(self._logprobs)} tokens")

    def cover(self, end: int, version: int) -> None:
        """Its first `end` tokens are in the cache now, the new ones among them computed under this version."""
        if version == self.kv_version and self.pure == self.computed:
            self.pure = end
        self.computed = end

    def leave(self) -> None:
        """It holds no block any more; in the cache it starts over."""
        self.blocks = []
        self.computed = self.pure = self.cached = 0
        self.kv_version = NO_VERSION

    def truncate(self, sampled: int) -> None:
        """Drop the sampled tokens beyond this many. They must not have been sent; `Scheduler.truncate` is the way in.

        Whoever has blocks may share them, so it must have left the cache.
        """
        if sampled < self._sent:
            raise RuntimeError(f"sequence {self.id}: {self._sent} tokens were sent, {sampled} were to be left")
        if self.blocks or self.in_flight:
            raise RuntimeError(f"sequence {self.id} still runs and cannot be cut")
        del self.tokens[self.prompt_length + sampled :]
        for records in (self._logprobs, self._versions, self._kept, self._routing):
            del records[sampled:]
        self.chain = None

    def delta(self, finish: FinishReason | None = None, error: str = "") -> Delta:
        """The tokens that were not sent before; they count as sent from here on."""
        first, self._sent = self._sent, len(self._logprobs)
        token_ids: Int32Array = np.array(self.tokens[self.prompt_length + first :], np.int32)
        logprobs: Float32Array = np.array(self._logprobs[first:], np.float32)
        versions: Int32Array = np.array(self._versions[first:], np.int32)
        return Delta(
            id=self.id,
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            finish=finish,
            error=error,
            kept=_joined(self._kept[first:]) if self._kept else None,
            routing=self._routing_from(first) if self._routing else None,
        )

    def _routing_from(self, first: int) -> Int16Array:
        records = np.empty((len(self._routing) - first, *self._routing[0].shape), np.int16)
        for row, record in enumerate(self._routing[first:]):
            records[row] = record
        return records


def _joined(kept: list[Int32Array]) -> Kept:
    counts: Int32Array = np.array([len(ids) for ids in kept], np.int32)
    token_ids: Int32Array = np.concatenate([np.empty(0, np.int32), *kept]).astype(np.int32)
    return Kept(counts=counts, token_ids=token_ids)


@dataclass(slots=True)
class Sampled:
    """Tokens drawn for one sequence, one after the other."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    sound: bool = True
    """All log-probabilities are numbers."""
    kept: list[Int32Array] | None = None
    routing: list[Int16Array] | None = None

    def cut(self, count: int) -> None:
        """Forget all but the first `count` tokens."""
        del self.tokens[count:], self.logprobs[count:], self.versions[count:]
        for records in (self.kept, self.routing):
            if records is not None:
                del records[count:]

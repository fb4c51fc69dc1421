"""One request inside the engine: its tokens so far, how many of them the cache holds, and how many were sent.

The records of a sampled token are its log-probability, version, kept set and experts. They are written once, when the
token becomes known, and survive preemption and a swap of weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headrace.engines.base import Delta, FinishReason, Request
from headrace.engines.embedded.kv_cache import Chain
from headrace.engines.requests import first_stop
from headrace.types import NO_VERSION, Int16Array, Int32Array, Kept

PrefixKey = tuple[str, bytes]
"""A group, and the bytes of the prompt that its requests share."""


@dataclass(frozen=True)
class Ending:
    """How a sequence ended, and how many of the newly drawn tokens belong to it."""

    finish: FinishReason
    tokens: int = 0
    error: str = ""
    version: int = NO_VERSION
    """The version under which the token that ended the sequence was drawn."""


class Sequence:
    """A request, the tokens sampled for it, and its place in the cache."""

    def __init__(self, request: Request, order: int) -> None:
        prompt = np.asarray(request.token_ids, np.int32)
        self.request = request
        self.id = request.id
        self.sampling = request.sampling
        self.rank = (request.priority, order)
        """(priority, order of submission). A sequence of lower rank is served first and preempted last."""
        self.prompt_length = len(prompt)
        self.limit = len(prompt) + request.sampling.max_tokens
        """The largest number of tokens that the sequence may have, prompt included."""
        self.tokens: list[int] = prompt.tolist()
        """The prompt and all sampled tokens that are known."""
        # The last prompt token is always computed, because it gives the logits of the first sampled token. So a prompt
        # of one token has nothing to share.
        shareable = bool(request.group) and len(prompt) > 1
        self.key: PrefixKey | None = (request.group, prompt.tobytes()) if shareable else None

        self.blocks: list[int] = []
        self.computed = 0
        """The number of tokens whose keys and values are in the cache."""
        self.kv_version = NO_VERSION
        """The version under which the first keys and values of the sequence were computed."""
        self.pure = 0
        """The length of the leading run of tokens whose keys and values were all computed under `kv_version`."""
        self.chain: Chain | None = None
        self.cached = 0
        """The number of leading blocks that were offered to the prefix cache."""

        self.row: int | None = None
        """The row of the sequence in the state of a device. The runner of that device owns this field."""
        self.in_flight = 0
        """The number of tokens that are being sampled and are not known yet. The runner updates this field."""

        self.ending: Ending | None = None
        """How the sequence ended; set while its last tokens are still held back."""
        self.flushed_at: float | None = None
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._kept: list[Int32Array] = []
        self._routing: list[Int16Array] = []
        self._times: list[float] = []
        """When each token was sampled, if the sampling settings name tokens that end steps."""
        self._sent = 0

    @property
    def sampled(self) -> int:
        """The number of tokens sampled so far."""
        return len(self._logprobs)

    @property
    def unsent(self) -> int:
        """The number of sampled tokens that no delta holds yet."""
        return len(self._logprobs) - self._sent

    def sampled_under(self, version: int) -> int:
        """Return how many of the last tokens were sampled under this version, which must be the newest one."""
        count = 0
        while count < len(self._versions) and self._versions[-1 - count] == version:
            count += 1
        return count

    def extend(self, new: Sampled, now: float = 0.0) -> None:
        """Record tokens that were sampled now. If one of them ends a step, the tokens are due to be sent.

        Each token was drawn by a pass under its version, and the same pass computed the keys and values of the token
        before it. Kept sets and experts are given for every token of a sequence or for none.
        """
        versions, last = new.versions, len(self.tokens) + len(new.tokens) - 1
        if versions and last > self.computed and versions[0] == versions[-1]:
            self.cover(last, versions[0])
        else:
            for end, version in enumerate(versions, len(self.tokens)):
                if end > self.computed:
                    self.cover(end, version)
        self.tokens += new.tokens
        self._logprobs += new.logprobs
        self._versions += versions
        self._kept += new.kept or ()
        self._routing += new.routing or ()
        if steps := self.sampling.step_token_ids:
            self._times += [now] * len(new.tokens)
            if not set(new.tokens).isdisjoint(steps):
                self.flushed_at = -math.inf
        count = len(self._logprobs)
        for records in (len(self._versions), len(self._kept) or count, len(self._routing) or count):
            if records != count:
                raise RuntimeError(f"sequence {self.id}: {records} records of {count} tokens")

    def cover(self, end: int, version: int) -> None:
        """Record that the first `end` tokens are now in the cache. The new ones were computed under this version."""
        if version == self.kv_version and self.pure == self.computed:
            self.pure = end
        self.computed = end

    def leave(self) -> None:
        """Record that the sequence holds no blocks any more, so that all its tokens must be computed again."""
        self.blocks = []
        self.computed = self.pure = self.cached = 0
        self.kv_version = NO_VERSION

    def truncate(self, sampled: int) -> None:
        """Drop the sampled tokens beyond the first `sampled`. Call this only through `Scheduler.truncate`.

        The dropped tokens must not have been sent. The sequence must hold no blocks, because blocks may be shared.
        """
        if sampled < self._sent:
            raise RuntimeError(f"sequence {self.id}: {self._sent} tokens were sent, {sampled} were to be left")
        if self.blocks or self.in_flight:
            raise RuntimeError(f"sequence {self.id} still runs and cannot be cut")
        del self.tokens[self.prompt_length + sampled :]
        for records in (self._logprobs, self._versions, self._kept, self._routing, self._times):
            del records[sampled:]
        self.chain = None

    def delta(self, finish: FinishReason | None = None, error: str = "") -> Delta:
        """Return a delta with the tokens that were not sent before, and count them as sent."""
        first, self._sent = self._sent, len(self._logprobs)
        routing: Int16Array | None = None
        if self._routing:
            routing = np.array(self._routing[first:], np.int16).reshape(-1, *self._routing[0].shape)
        return Delta(
            id=self.id,
            token_ids=np.array(self.tokens[self.prompt_length + first :], np.int32),
            logprobs=np.array(self._logprobs[first:], np.float32),
            versions=np.array(self._versions[first:], np.int32),
            finish=finish,
            error=error,
            kept=_joined(self._kept[first:]) if self._kept else None,
            routing=routing,
            times=np.array(self._times[first:], np.float64) if self._times else None,
        )


def _joined(kept: list[Int32Array]) -> Kept:
    counts: Int32Array = np.array([len(ids) for ids in kept], np.int32)
    return Kept(counts=counts, token_ids=np.concatenate([np.empty(0, np.int32), *kept]).astype(np.int32))


@dataclass(slots=True)
class Sampled:
    """Consecutive tokens that were drawn for one sequence, with their records."""

    sequence: Sequence
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    sound: bool = True
    """Whether all log-probabilities are finite."""
    kept: list[Int32Array] | None = None
    """The kept ids of each token, ascending."""
    routing: list[Int16Array] | None = None
    """The experts of each token, [layers, k]."""

    def cut(self, count: int) -> None:
        """Drop all but the first `count` tokens."""
        del self.tokens[count:], self.logprobs[count:], self.versions[count:]
        for records in (self.kept, self.routing):
            if records is not None:
                del records[count:]


def ending(new: Sampled) -> Ending | None:
    """Return where the sequence ends among its new tokens, or None if it continues.

    A sequence ends at its first stop, at a log-probability that is not finite, or at its length limit.
    """
    sequence, sampling = new.sequence, new.sequence.sampling
    room, count = sequence.limit - len(sequence.tokens), len(new.tokens)
    stops = bool(sampling.stop_token_ids or sampling.stop_sequences)
    if count < room and new.sound and not stops:
        return None
    count = min(count, room)
    broken = count if new.sound else next((i for i in range(count) if not math.isfinite(new.logprobs[i])), count)
    stop = first_stop(new.tokens[:broken], sampling, sequence.tokens, sequence.sampled) if stops else None
    if stop is not None:
        return Ending("stop", stop, version=new.versions[stop - 1])
    if broken < count:
        where = f"position {len(sequence.tokens) + broken} under version {new.versions[broken]}"
        error = f"request {sequence.id}: the logits are not finite at {where}"
        return Ending("failed", broken, error, new.versions[broken])
    return Ending("length", room, version=new.versions[room - 1]) if len(new.tokens) >= room else None

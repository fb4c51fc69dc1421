"""The nouns: what flows between the stages, and nothing else.

Everything here is plain data that crosses process boundaries as it is (see `channel`). Tokens are the truth: text is
rendered from token ids for people to read, never the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

Int16Array = npt.NDArray[np.int16]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Ending = Literal["finished", "truncated", "aborted", "failed"]
"""How a rollout ended: by itself, at its length limit, by our own decision, or by an error."""

POLICY = "policy"
"""The id of a run's policy where the configuration gives it no name of its own."""

TASK = "task"
"""The name of a run's task where the configuration gives it none."""

Level = Literal["rollout", "turn", "step", "token"]
"""What a score is about: the whole rollout, a turn of the policy, a step within a turn, or single tokens."""

NO_VERSION = -1
"""The version of a token that no policy sampled (a prompt, a tool's answer)."""

NO_EXPERT = -1
"""In place of a token's experts: nobody recorded them, and its router chooses."""


def join_routing(parts: Sequence[tuple[int, Int16Array | None]]) -> Int16Array | None:
    """The experts of parts of so many tokens each, one after the other; None where no part has any."""
    known = next((routing for _, routing in parts if routing is not None), None)
    if known is None:
        return None
    free = [np.full((n, *known.shape[1:]), NO_EXPERT, np.int16) if routing is None else routing for n, routing in parts]
    return np.concatenate(free)


def without_republished(versions: Any, republished: Sequence[int]) -> Any:
    """Version ids as if weights that were published again, under the next free id, had kept their first one.

    `republished` are those next ids, in ascending order. Lag is a difference of these numbers: a restart that gives the
    same weights a new id makes no token older.
    """
    if not len(republished):
        return versions
    return versions - np.searchsorted(np.asarray(republished), versions, side="right").astype(np.int32)


def republished_among(versions: Iterable[tuple[int, int]]) -> list[int]:
    """Of (id, optimizer steps behind it), in the order of ids: those whose weights had another id before."""
    found, most = [], -1
    for version, step in versions:
        if step <= most:
            found.append(version)
        most = max(most, step)
    return found


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A task's unit of work, with an id that is the same in every run and after every restart.

    Exactly one of `messages` (rendered with the model's chat template) and `text` (used as it is) is given.
    """

    id: str
    messages: list[dict[str, str]] | None = None
    text: str | None = None
    data: dict[str, Any] = {}
    """What the judge needs (the right answer, the task's own entry): JSON values only."""


class Kept(msgspec.Struct, kw_only=True):
    """The tokens that truncation (top-k, top-p, min-p) left to draw from, for some tokens one after the other."""

    counts: Int32Array
    """How many, for each token; 0 where nothing was truncated: the whole vocabulary."""
    token_ids: Int32Array
    """All of them, joined; those of one token in ascending order."""

    def at(self, places: npt.NDArray[np.integer[Any]]) -> Kept:
        """Those of the tokens at these places, in this order."""
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        counts = self.counts[places]
        begins = np.cumsum(counts, dtype=np.int64) - counts
        index = np.repeat(starts[places] - begins, counts) + np.arange(int(counts.sum()))
        return Kept(counts=counts, token_ids=self.token_ids[index])

    @staticmethod
    def joined(parts: Sequence[tuple[int, Kept | None]]) -> Kept | None:
        """Those of parts of so many tokens each, one after the other; None where no part has any."""
        if all(kept is None for _, kept in parts):
            return None
        counts = [np.zeros(n, np.int32) if kept is None else kept.counts for n, kept in parts]
        ids = [kept.token_ids for _, kept in parts if kept is not None]
        return Kept(
            counts=np.concatenate(counts).astype(np.int32), token_ids=np.concatenate(ids).astype(np.int32, copy=False)
        )


class Trace(msgspec.Struct, kw_only=True):
    """One token stream as flat arrays of equal length.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution it was really sampled from, and
    `versions[i]` the policy version behind it. Where `trained[i]` is False the two are 0 and `NO_VERSION`, unless the
    token was once sampled and only kept as context; then its original records stay.
    """

    token_ids: Int32Array
    trained: BoolArray
    logprobs: Float32Array
    versions: Int32Array
    kept: Kept | None = None
    """What each token was drawn from, where sampling truncates; for every token of the trace, or None."""
    routing: Int16Array | None = None
    """[tokens, layers, k]: the experts of the pass that each token was drawn from, which is the pass over the token
    before it; `NO_EXPERT` for a token that was not sampled. None where no engine records experts."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of_context(cls, token_ids: Int32Array) -> Trace:
        """A trace of tokens that nobody sampled: a prompt, before its answer."""
        n = len(token_ids)
        return cls(
            token_ids=np.asarray(token_ids, np.int32),
            trained=np.zeros(n, np.bool_),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, NO_VERSION, np.int32),
        )

    @staticmethod
    def joined(parts: Sequence[Trace]) -> Trace:
        """One stream of these, one after the other."""
        return Trace(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            trained=np.concatenate([part.trained for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            kept=Kept.joined([(len(part), part.kept) for part in parts]),
            routing=join_routing([(len(part), part.routing) for part in parts]),
        )

    def part(self, start: int, end: int) -> Trace:
        """Its tokens from one place up to another."""
        places = np.arange(start, min(end, len(self)))
        return Trace(
            token_ids=self.token_ids[start:end],
            trained=self.trained[start:end],
            logprobs=self.logprobs[start:end],
            versions=self.versions[start:end],
            kept=None if self.kept is None else self.kept.at(places),
            routing=None if self.routing is None else self.routing[start:end],
        )

    def extended(self, token_ids: Int32Array, logprobs: Float32Array, versions: Int32Array, *, trained: bool) -> Trace:
        """A new trace with these tokens appended."""
        n = len(token_ids)
        return Trace(
            token_ids=np.concatenate([self.token_ids, np.asarray(token_ids, np.int32)]),
            trained=np.concatenate([self.trained, np.full(n, trained, np.bool_)]),
            logprobs=np.concatenate([self.logprobs, np.asarray(logprobs, np.float32)]),
            versions=np.concatenate([self.versions, np.asarray(versions, np.int32)]),
            kept=Kept.joined([(len(self), self.kept), (n, None)]),
            routing=join_routing([(len(self), self.routing), (n, None)]),
        )

    @property
    def trained_tokens(self) -> int:
        """How many tokens of this trace the policy sampled and may be trained on."""
        return int(self.trained.sum())

    @property
    def oldest_version(self) -> int:
        """The oldest version behind a trained token (`NO_VERSION` if there is none)."""
        return int(self.versions[self.trained].min()) if self.trained.any() else NO_VERSION


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one scorer says of a rollout, or of some tokens of it. Where it is about tokens, it names them."""

    value: float
    scorer: str = ""
    """The scorer's name: its name in the configuration, or `environment`, or `agent`."""
    version: str = ""
    """The version of the scorer that gave the score."""
    level: Level = "rollout"
    trace: int = 0
    """The trace that the tokens are in. This field, `start` and `end` mean nothing at level `rollout`."""
    start: int = 0
    """The position of the first of the tokens in their trace."""
    end: int = 0
    """The position after the last of the tokens."""
    metrics: dict[str, float] = {}


class Rollout(msgspec.Struct, kw_only=True):
    """One episode: one or more traces, scores, a reward, and how it ended."""

    id: str
    """`<group id>/<index>`."""
    index: int
    traces: list[Trace]
    ending: Ending
    reward: float | None = None
    """The scores of the whole rollout, combined. None until it is scored, and for ever if it failed."""
    reason: str = ""
    """Why it failed or was aborted, in one line."""
    metrics: dict[str, float] = {}
    scores: list[Score] = []
    """Every score that the rollout was given, of all levels; rollouts of older runs have none."""

    @property
    def trained_tokens(self) -> int:
        """Tokens over all traces that may be trained on."""
        return sum(trace.trained_tokens for trace in self.traces)

    @property
    def sampled_tokens(self) -> int:
        """Tokens over all traces that a policy sampled, in this attempt or in one that it goes on from."""
        return sum(int((trace.versions != NO_VERSION).sum()) for trace in self.traces)


class Group(msgspec.Struct, kw_only=True):
    """The rollouts of one attempt at one prompt, compared with each other."""

    id: int
    """The attempt's number: unique in a run, increasing in the order of admission."""
    prompt: Prompt
    version: int
    """The version that the engines had proved when the group was admitted: no token of it is older."""
    policy: str = POLICY
    """The policy that this group trains; `version` is one of its versions."""
    rollouts: list[Rollout] = []

    @property
    def usable(self) -> list[Rollout]:
        """The rollouts that did not fail."""
        return [rollout for rollout in self.rollouts if rollout.ending != "failed"]


class Batch(msgspec.Struct, kw_only=True):
    """What the trainer gets for one optimizer step: S sequences, flat over T tokens. It names no algorithm.

    The loss of the step is `sum(weights * token_loss)`: normalisation is already inside `weights`, so it spans the
    whole optimizer step however the trainer cuts the batch into micro-batches.
    """

    step: int
    """The optimizer step this batch is for, counted from 1."""
    version: int
    """The version being trained: lag is counted from here."""
    policy: str = POLICY
    """The policy that is trained; all versions here are its versions."""
    objective: Literal["policy", "imitation"] = "policy"
    """The configured policy loss, or plain likelihood (a supervised warm start)."""
    token_ids: Int32Array  # [T]
    lengths: Int32Array  # [S], sums to T
    groups: Int32Array  # [S], equal for sequences that may share a prefix
    trained: BoolArray  # [T]
    logprobs: Float32Array  # [T], recorded by the engine, of the sampling distribution
    versions: Int32Array  # [T]
    advantages: Float32Array  # [T]
    weights: Float32Array  # [T], zero where not trained
    temperature: float = 1.0
    """The sampling temperature: the trainer's log-probabilities are taken at it too."""
    kept: Kept | None = None
    """What each of the T tokens was drawn from, where sampling truncates: the trainer normalises over it too."""
    routing: Int16Array | None = None
    """[T, layers, k], as in `Trace`: the trainer's passes go through the same experts."""
    republished: list[int] = []
    """See `without_republished`."""

    @property
    def trained_tokens(self) -> int:
        """Tokens that reach the loss."""
        return int(self.trained.sum())

    def lags(self) -> Int32Array:
        """The lag of every trained token."""
        return self.token_lags()[self.trained]

    def token_lags(self) -> Int32Array:
        """The lag of every token; it means nothing where nobody sampled the token."""
        trained = without_republished(self.version, self.republished)
        return np.asarray(trained - without_republished(self.versions, self.republished), np.int32)


STEP_SECONDS = 0.02
"""Of a decode step, about: an engine that dies loses as much more than it held back."""


def held_back_seconds(running: int) -> float:
    """How long an engine holds sampled tokens back, at most: 0.08 s, or what makes 5,000 deltas a second, or 0.2 s."""
    return min(0.2, max(0.08, running / 5000))


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """An id of published weights: increasing, never reused."""

    id: int
    parent: int
    step: int
    """Optimizer steps behind these weights."""
    digest: int
    """See `delivery.digest`."""
    policy: str = POLICY
    """Whose weights they are: ids are a policy's own."""

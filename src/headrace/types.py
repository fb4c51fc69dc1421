"""The data types that flow between the stages, and nothing else.

Every type here is plain data, which crosses process boundaries unchanged (see `channel`). Token ids are the source of
truth: text is rendered from token ids for people to read, and the tokens of a trace are never made again from text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.errors import HeadraceError

Int16Array = npt.NDArray[np.int16]
Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

Ending = Literal["finished", "truncated", "aborted", "failed"]
"""How a rollout ended: by itself, at its length limit, by a decision of Headrace, or by an error."""

POLICY = "policy"
"""The id of a run's policy if the configuration gives the policy no name."""

TASK = "task"
"""The name of a run's task if the configuration gives the task no name."""

LOW_SCORE = "low_score"
"""The reason of a rollout that was ended because a step of it scored too low, and of a group of such rollouts."""

Level = Literal["rollout", "turn", "step", "token"]
"""What a score is about: the whole rollout, a turn of the policy, a step within a turn, or tokens."""

NO_VERSION = -1
"""The version of a token that no policy sampled, such as a token of a prompt or of a tool's answer."""

NO_EXPERT = -1
"""The placeholder for the experts of a token if they were not recorded. The trainer's router then chooses them."""


def join_routing(parts: Sequence[tuple[int, Int16Array | None]]) -> Int16Array | None:
    """Join the routing of consecutive parts of a trace, each given as (number of tokens, routing).

    Tokens of a part without routing get `NO_EXPERT`. Return None if no part has routing.
    """
    known = next((routing for _, routing in parts if routing is not None), None)
    if known is None:
        return None
    free = [np.full((n, *known.shape[1:]), NO_EXPERT, np.int16) if routing is None else routing for n, routing in parts]
    return np.concatenate(free)


Temperatures = list[tuple[int, float]]
"""The sampling temperatures of consecutive tokens, as (number of tokens, temperature). 0 where none is recorded."""


def join_temperatures(parts: Iterable[tuple[int, Temperatures]]) -> Temperatures:
    """Join the temperatures of consecutive parts, each (number of tokens, temperatures). Empty if none is recorded."""
    runs: Temperatures = []
    for length, temperatures in parts:
        for count, temperature in temperatures or [(length, 0.0)]:
            if runs and runs[-1][1] == temperature:
                runs[-1] = (runs[-1][0] + count, temperature)
            elif count:
                runs.append((count, temperature))
    return runs if any(temperature for _, temperature in runs) else []


def _temperatures_between(temperatures: Temperatures, start: int, end: int) -> Temperatures:
    """Return the temperatures of the tokens from position `start` up to, but not including, `end`."""
    parts, at = [], 0
    for count, temperature in temperatures:
        inside = min(at + count, end) - max(at, start)
        if inside > 0:
            parts.append((inside, [(inside, temperature)]))
        at += count
    return join_temperatures(parts)


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64, a bijection: each input bit changes about half of the output bits."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def without_republished(versions: Any, republished: Sequence[int]) -> Any:
    """Return version ids as if republished weights had kept their first id.

    After a restart the same weights are published again under the next free id. `republished` holds these later ids in
    ascending order. Lag is a difference of the returned numbers, so a restart does not make any token older.
    """
    if not len(republished):
        return versions
    return versions - np.searchsorted(np.asarray(republished), versions, side="right").astype(np.int32)


def republished_among(versions: Iterable[tuple[int, int]]) -> list[int]:
    """Return the ids whose weights had another id before, given (id, optimizer steps) in the order of ids."""
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
    """The values that a scorer needs, such as the right answer or the task's own entry. JSON values only."""
    as_text: bool = False
    """Whether a dataset gave this prompt as text, from which `messages` were made."""
    task: str = ""
    """The name of the prompt's task if the run has several tasks. Then the id begins with this name and a slash."""


class Kept(msgspec.Struct, kw_only=True):
    """The kept sets of consecutive tokens: the token ids that truncation (top-k, top-p, min-p) left to draw from."""

    counts: Int32Array
    """The size of each token's kept set. 0 means that nothing was truncated: the token was drawn from the whole
    vocabulary."""
    token_ids: Int32Array
    """All kept sets, one after the other. The ids within one set are in ascending order."""

    def at(self, places: npt.NDArray[np.integer[Any]]) -> Kept:
        """Return the kept sets of the tokens at these positions, in this order."""
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        counts = self.counts[places]
        begins = np.cumsum(counts, dtype=np.int64) - counts
        index = np.repeat(starts[places] - begins, counts) + np.arange(int(counts.sum()))
        return Kept(counts=counts, token_ids=self.token_ids[index])

    @staticmethod
    def joined(parts: Sequence[tuple[int, Kept | None]]) -> Kept | None:
        """Join the kept sets of consecutive parts, each (number of tokens, kept sets). None if no part has any."""
        if all(kept is None for _, kept in parts):
            return None
        counts = [np.zeros(n, np.int32) if kept is None else kept.counts for n, kept in parts]
        ids = [kept.token_ids for _, kept in parts if kept is not None]
        return Kept(
            counts=np.concatenate(counts).astype(np.int32), token_ids=np.concatenate(ids).astype(np.int32, copy=False)
        )


class TeacherScores(msgspec.Struct, kw_only=True):
    """A teacher's log-probabilities at n consecutive tokens, at the temperature at which each token was sampled.

    A token that no teacher has scored has the version `NO_VERSION`, and its numbers have no meaning.
    """

    logprobs: Float32Array
    """[n], of the tokens themselves."""
    versions: Int32Array
    """[n], the proved version of the teacher that scored the token."""
    top_ids: Int32Array
    """[n, k], the k likeliest tokens, in ascending order of their ids. k is 0 if only the tokens were scored."""
    top_logprobs: Float32Array
    """[n, k], of the likeliest tokens."""
    tails: Float32Array
    """[n], the logarithm of the probability of all other tokens together; 0 if k is 0."""

    @property
    def k(self) -> int:
        """The number of likeliest tokens at each token."""
        return int(self.top_ids.shape[1])

    @classmethod
    def of_unscored(cls, n: int, k: int) -> TeacherScores:
        """Return the record of n tokens that no teacher has scored."""
        return cls(
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, NO_VERSION, np.int32),
            top_ids=np.zeros((n, k), np.int32),
            top_logprobs=np.zeros((n, k), np.float32),
            tails=np.zeros(n, np.float32),
        )

    def at(self, places: Any) -> TeacherScores:
        """Return the scores of the tokens at these positions, which are a slice or an array, in this order."""
        return TeacherScores(**{name: getattr(self, name)[places] for name in self.__struct_fields__})

    @staticmethod
    def joined(parts: Sequence[tuple[int, TeacherScores | None]]) -> TeacherScores | None:
        """Join the scores of consecutive parts, each (number of tokens, scores). None if no part has any.

        Raises `HeadraceError` if the parts have different numbers of likeliest tokens.
        """
        known = {scores.k for _, scores in parts if scores is not None}
        if not known:
            return None
        if len(known) > 1:
            raise HeadraceError(
                f"rollouts with {min(known)} and with {max(known)} likeliest tokens of a teacher cannot be trained "
                "together: resume with the [algorithm] teacher_top_k that they were scored with"
            )
        k = known.pop()
        every = [TeacherScores.of_unscored(n, k) if scores is None else scores for n, scores in parts]
        return TeacherScores(
            **{
                name: np.concatenate([getattr(scores, name) for scores in every])
                for name in TeacherScores.__struct_fields__
            }
        )


class Trace(msgspec.Struct, kw_only=True):
    """One token stream as flat arrays of equal length.

    `logprobs[i]` is the log-probability of `token_ids[i]` under the distribution that the token was sampled from, and
    `versions[i]` is the policy version that sampled it. Where `trained[i]` is False, these are 0 and `NO_VERSION`. The
    exception is a token that was sampled and later kept only as context: it keeps its original records.
    """

    token_ids: Int32Array
    trained: BoolArray
    logprobs: Float32Array
    versions: Int32Array
    kept: Kept | None = None
    """The kept set of every token of the trace; None if sampling does not truncate."""
    routing: Int16Array | None = None
    """The experts that produced each token, with shape [tokens, layers, k]. A token is drawn from the forward pass over
    the token before it, so these are the experts of that pass. `NO_EXPERT` marks a token that was not sampled. None if
    no engine records experts."""
    temperatures: Temperatures = []
    """The temperatures at which the tokens were sampled. Older releases recorded none, and context has none."""
    teacher: TeacherScores | None = None
    """The scores that a teacher gave the tokens; None if no teacher was asked."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def temperature_of_tokens(self, unrecorded: float) -> npt.NDArray[np.float64]:
        """Return the temperature of every token. It is `unrecorded` where none is recorded."""
        runs = self.temperatures or [(len(self), 0.0)]
        return np.repeat([temperature or unrecorded for _, temperature in runs], [count for count, _ in runs])

    @classmethod
    def of_context(cls, token_ids: Int32Array) -> Trace:
        """Return a trace of tokens that no policy sampled, such as a prompt before its answer."""
        n = len(token_ids)
        return cls(
            token_ids=np.asarray(token_ids, np.int32),
            trained=np.zeros(n, np.bool_),
            logprobs=np.zeros(n, np.float32),
            versions=np.full(n, NO_VERSION, np.int32),
        )

    @staticmethod
    def joined(parts: Sequence[Trace]) -> Trace:
        """Join these traces, one after the other, into one trace."""
        return Trace(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            trained=np.concatenate([part.trained for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([part.versions for part in parts]),
            kept=Kept.joined([(len(part), part.kept) for part in parts]),
            routing=join_routing([(len(part), part.routing) for part in parts]),
            temperatures=join_temperatures((len(part), part.temperatures) for part in parts),
            teacher=TeacherScores.joined([(len(part), part.teacher) for part in parts]),
        )

    def part(self, start: int, end: int) -> Trace:
        """Return the tokens from position `start` up to, but not including, `end`."""
        return Trace(
            token_ids=self.token_ids[start:end],
            trained=self.trained[start:end],
            logprobs=self.logprobs[start:end],
            versions=self.versions[start:end],
            kept=None if self.kept is None else self.kept.at(np.arange(start, min(end, len(self)))),
            routing=None if self.routing is None else self.routing[start:end],
            temperatures=_temperatures_between(self.temperatures, start, end),
            teacher=None if self.teacher is None else self.teacher.at(slice(start, end)),
        )

    def extended(self, token_ids: Int32Array, logprobs: Float32Array, versions: Int32Array, *, trained: bool) -> Trace:
        """Return a new trace with these tokens appended."""
        more = Trace(
            token_ids=np.asarray(token_ids, np.int32),
            trained=np.full(len(token_ids), trained, np.bool_),
            logprobs=np.asarray(logprobs, np.float32),
            versions=np.asarray(versions, np.int32),
        )
        return Trace.joined([self, more])

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that the policy sampled and that may be trained on."""
        return int(self.trained.sum())

    @property
    def oldest_version(self) -> int:
        """The oldest version among the trained tokens; `NO_VERSION` if there are none."""
        return int(self.versions[self.trained].min()) if self.trained.any() else NO_VERSION


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score that one scorer gave to a rollout, or to some of its tokens, which are named by their positions."""

    value: float
    scorer: str = ""
    """The scorer's name: its name in the configuration, or `environment`, or `agent`."""
    version: str = ""
    """The version of the scorer that gave the score."""
    level: Level = "rollout"
    trace: int = 0
    """The index of the trace that holds the tokens. `trace`, `start` and `end` have no meaning at level `rollout`."""
    start: int = 0
    """The position of the first token in the trace."""
    end: int = 0
    """The position after the last token."""
    metrics: dict[str, float] = {}


class Rollout(msgspec.Struct, kw_only=True):
    """One episode: one or more traces, their scores, the reward, and how the episode ended."""

    id: str
    """`<group id>/<index>`."""
    index: int
    traces: list[Trace]
    ending: Ending
    reward: float | None = None
    """The scores of the whole rollout, combined. None before scoring, and None for ever if the rollout failed."""
    reason: str = ""
    """Why the rollout failed or was aborted, in one line."""
    metrics: dict[str, float] = {}
    scores: list[Score] = []
    """Every score that the rollout was given, at all levels. Rollouts that older releases recorded have none."""

    @property
    def trained_tokens(self) -> int:
        """The number of tokens, over all traces, that may be trained on."""
        return sum(trace.trained_tokens for trace in self.traces)

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens, over all traces, that a policy sampled, in this attempt or in one that it continues."""
        return sum(int((trace.versions != NO_VERSION).sum()) for trace in self.traces)


class Group(msgspec.Struct, kw_only=True):
    """The rollouts of one attempt at one prompt, which are compared with each other."""

    id: int
    """The number of the attempt. It is unique in a run and increases in the order of admission."""
    prompt: Prompt
    version: int
    """The version that the engines had proved when the group was admitted. No trained token of the group is older."""
    policy: str = POLICY
    """The policy that this group trains; `version` is a version of this policy."""
    rollouts: list[Rollout] = []

    @property
    def usable(self) -> list[Rollout]:
        """The rollouts that did not fail."""
        return [rollout for rollout in self.rollouts if rollout.ending != "failed"]


class Batch(msgspec.Struct, kw_only=True):
    """The input of the trainer for one optimizer step: S sequences, flat over T tokens. A batch names no algorithm.

    The loss of the step is `sum(weights * token_loss)`. The normalisation is already inside `weights`, so it spans the
    whole optimizer step, no matter how the trainer cuts the batch into micro-batches. A batch may ask for several
    updates in its step: each update is for one of its minibatches, and the weights are normalised over that minibatch.
    """

    step: int
    """The optimizer step that this batch is for, counted from 1."""
    version: int
    """The version being trained. Lag is counted from this version."""
    policy: str = POLICY
    """The policy that is trained. All versions in the batch are versions of this policy."""
    objective: Literal["policy", "imitation"] = "policy"
    """`policy` uses the configured policy loss; `imitation` uses plain likelihood (the supervised warm start)."""
    token_ids: Int32Array  # [T]
    lengths: Int32Array  # [S], sums to T
    groups: Int32Array  # [S], equal for sequences that may share a prefix
    trained: BoolArray  # [T]
    logprobs: Float32Array  # [T], recorded by the engine, of the sampling distribution
    versions: Int32Array  # [T]
    advantages: Float32Array  # [T]
    weights: Float32Array  # [T], zero where not trained
    temperature: float = 1.0
    """The sampling temperature. The trainer computes its log-probabilities at this temperature too."""
    temperatures: Float32Array | None = None
    """The sampling temperature of each of the T tokens, if the trained tokens were not all sampled at `temperature`."""
    kept: Kept | None = None
    """The kept set of each of the T tokens, if sampling truncates. The trainer normalises over the kept set too."""
    routing: Int16Array | None = None
    """The experts of each token, with shape [T, layers, k], as in `Trace`. The trainer's passes use these experts."""
    teacher: TeacherScores | None = None
    """The scores of each of the T tokens by a teacher outside of the trainer. Every trained token has been scored."""
    republished: list[int] = []
    """The version ids whose weights had another id before; see `without_republished`."""
    rewards: Float32Array | None = None
    """What each of the T tokens earns, for a critic. Then the critic gives the advantages, and those here are 0."""
    minibatches: Int32Array | None = None
    """The minibatch that each of the S sequences belongs to, counted from 0. None if there is only one."""
    epochs: int = 1
    """How often each minibatch is trained in the step."""

    def parts(self) -> list[Batch]:
        """Return the minibatches as batches of their own, in their order."""
        if self.minibatches is None or not len(self.minibatches):
            return [self]
        return [self._part(self.minibatches == number) for number in np.unique(self.minibatches)]

    def _part(self, chosen: BoolArray) -> Batch:
        """Return the batch of the chosen sequences."""
        places = np.flatnonzero(np.repeat(chosen, self.lengths))
        per_token = (
            *("token_ids", "trained", "logprobs", "versions", "advantages", "weights"),
            *("temperatures", "routing", "rewards"),
        )
        arrays = {name: array[places] for name in per_token if (array := getattr(self, name)) is not None}
        return msgspec.structs.replace(
            self,
            **arrays,
            lengths=self.lengths[chosen],
            groups=self.groups[chosen],
            kept=None if self.kept is None else self.kept.at(places),
            teacher=None if self.teacher is None else self.teacher.at(places),
            minibatches=None,
            epochs=1,
        )

    def temperature_at(self, places: npt.NDArray[np.integer[Any]]) -> float | Float32Array:
        """Return the temperature of the tokens at these positions, or of each of them."""
        return self.temperature if self.temperatures is None else self.temperatures[places]

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that reach the loss."""
        return int(self.trained.sum())

    def lags(self) -> Int32Array:
        """Return the lag of every trained token."""
        return self.token_lags()[self.trained]

    def token_lags(self) -> Int32Array:
        """Return the lag of every token. The number has no meaning for a token that no policy sampled."""
        trained = without_republished(self.version, self.republished)
        return np.asarray(trained - without_republished(self.versions, self.republished), np.int32)


STEP_SECONDS = 0.02
"""The approximate duration of one decode step. An engine that dies loses the tokens that it held back (see
`held_back_seconds`) and about one decode step more."""


def held_back_seconds(running: int) -> float:
    """Return the longest time for which an engine with `running` requests holds sampled tokens back.

    The time grows with the number of requests, so that an engine sends at most about 5,000 deltas a second.
    """
    return min(0.2, max(0.08, running / 5000))


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Published weights and their id. Ids increase and are never reused."""

    id: int
    parent: int
    step: int
    """The number of optimizer steps behind these weights."""
    digest: int
    """The digest of the weights; see `delivery.digest`."""
    policy: str = POLICY
    """The policy that the weights belong to. Each policy counts its own ids."""

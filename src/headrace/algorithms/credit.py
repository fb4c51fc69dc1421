"""Advantages of parts of a rollout, from scores that are finer than the rollout. No torch is imported here.

A rollout is cut into segments: its turns, its scored steps, or its single tokens. A segment earns the weighted scores
that end in it, and the last segment also earns the rollout's reward. The return of a segment is what the rollout earns
from there on, where each later segment counts `discount` times as much as the one before it. The returns of segments
that are like each other are compared by the same estimators that compare the rewards of whole rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from headrace.algorithms.advantages import COMPARES, FloatArray, IntArray, advantages, advantages_of_sets
from headrace.types import NO_VERSION, BoolArray, Int32Array, Rollout, Trace

Of = Literal["rollout", "turn", "step", "token"]
Baseline = Literal["group", "position", "state", "prefix"]


@dataclass(frozen=True)
class Credit:
    """How rewards and finer scores become the advantages of a rollout's tokens."""

    of: Of = "rollout"
    """What has an advantage of its own."""
    discount: float = 1.0
    baseline: Baseline = "position"
    """Which segments of a group are compared with each other: all, or those that are alike (see `_likenesses`)."""
    outcome_weight: float = 0.0
    """The weight of the advantage of the rollout's reward, which is added to the advantage of each segment."""
    scorers: Mapping[str, float] = field(default_factory=dict)
    """The weights of scorers. A scorer that is not named weighs 1."""


BY_ROLLOUT = Credit()
"""Every token has the advantage of its rollout's reward."""


class Tokens(NamedTuple):
    """The tokens of a step as one sequence: groups, their rollouts, the traces and the tokens, each in their order."""

    traces: list[Trace]
    bounds: IntArray
    """The position of each trace's first token, and after them the number of all tokens."""
    rollouts: IntArray
    """The number of each trace's rollout, counted over the step."""
    groups: IntArray
    """The number of each rollout's group."""
    sampled: BoolArray
    """Whether a policy sampled the token, for every token."""


class FinerScores(NamedTuple):
    """The scores of a step that are about some tokens of a rollout, as arrays with one entry for each score."""

    rollouts: IntArray
    """The number of the score's rollout."""
    traces: IntArray
    """The number of the score's trace, counted over the step."""
    ends: IntArray
    """The position after the last scored token, among the tokens of the step."""
    amounts: FloatArray
    """The value of the score, times the weight of its scorer."""
    steps: BoolArray
    """Whether the score is of level `step`."""


class Segments(NamedTuple):
    """The segments of a step in their order, as arrays with one entry for each segment."""

    starts: IntArray
    """The position of the segment's first token, among the tokens of the step."""
    ends: IntArray
    """The position after its last token."""
    rollouts: IntArray
    """The number of its rollout."""


def tokens_of(groups: Sequence[Sequence[Rollout]]) -> Tokens:
    """Return the tokens of the rollouts of each group."""
    rollouts = [rollout for group in groups for rollout in group]
    traces = [trace for rollout in rollouts for trace in rollout.traces]
    return Tokens(
        traces=traces,
        bounds=np.cumsum([0, *(len(trace) for trace in traces)]),
        rollouts=np.repeat(np.arange(len(rollouts)), [len(rollout.traces) for rollout in rollouts]),
        groups=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        sampled=_joined([_sampled(trace) for trace in traces], np.bool_),
    )


def finer_scores(rollouts: Sequence[Rollout], tokens: Tokens, scorers: Mapping[str, float]) -> FinerScores:
    """Return the scores of all levels below `rollout`. `tokens` are those of the rollouts, `scorers` are weights."""
    scores_of = [[score for score in rollout.scores if score.level != "rollout"] for rollout in rollouts]
    scores = [score for of_rollout in scores_of for score in of_rollout]
    numbers = np.repeat(np.arange(len(rollouts)), [len(of_rollout) for of_rollout in scores_of])
    traces = np.searchsorted(tokens.rollouts, numbers) + np.array([score.trace for score in scores], np.int64)
    # Whatever a score names, it is about its own rollout.
    traces = np.minimum(traces, np.searchsorted(tokens.rollouts, numbers, side="right") - 1)
    ends = tokens.bounds[traces] + np.array([score.end for score in scores], np.int64)
    return FinerScores(
        rollouts=numbers,
        traces=traces,
        ends=np.minimum(ends, tokens.bounds[traces + 1]),
        amounts=np.array([scorers.get(score.scorer, 1.0) * score.value for score in scores], np.float64),
        steps=np.array([score.level == "step" for score in scores], np.bool_),
    )


def segments(tokens: Tokens, of: Of, scores: FinerScores) -> Segments:
    """Return the segments of a step in their order, so that each sampled token is in exactly one of them.

    A turn is an unbroken run of sampled tokens. Steps end where scores of level `step` end, and where their turn ends.
    """
    # edges[i]: the tokens i - 1 and i cannot be in one segment.
    edges = np.full(len(tokens.sampled) + 1, of == "token")
    edges[tokens.bounds] = True
    edges[1:-1] |= tokens.sampled[1:] != tokens.sampled[:-1]
    if of == "step":
        edges[scores.ends[scores.steps]] = True
    starts = np.flatnonzero(tokens.sampled & edges[:-1])
    ends = np.flatnonzero(tokens.sampled & edges[1:]) + 1
    return Segments(starts, ends, tokens.rollouts[_trace_at(tokens, starts)])


def returns(parts: Segments, rewards: FloatArray, scores: FinerScores, discount: float) -> FloatArray:
    """Return what a rollout earns from each of its segments on. `rewards` has the reward of each rollout."""
    earned = np.zeros(len(parts.starts), np.float64)
    first = np.searchsorted(parts.rollouts, np.arange(len(rewards)))
    last = np.searchsorted(parts.rollouts, np.arange(len(rewards)), side="right") - 1
    # A rollout of which no policy sampled a token has no segment, and earns nothing.
    earns = first <= last
    counted = earns[scores.rollouts]
    # The segment that holds the last scored token, or the one before it if no policy sampled that token.
    at = np.searchsorted(parts.starts, scores.ends[counted] - 1, side="right") - 1
    np.add.at(earned, np.maximum(at, first[scores.rollouts[counted]]), scores.amounts[counted])
    earned[last[earns]] += rewards[earns]
    return to_go(earned, parts.rollouts, discount)


def to_go(earned: FloatArray, rollouts: IntArray, discount: float) -> FloatArray:
    """Return G with G(k) = earned(k) + discount x G(k + 1), where the G after the last segment of a rollout is 0."""
    found, reach = earned.copy(), 1
    while (same := rollouts[reach:] == rollouts[:-reach]).any():
        # Here found[k] is the discounted sum of the first `reach` terms from k on. This doubles their number.
        found[:-reach] += np.where(same, discount**reach * found[reach:], 0.0)
        reach *= 2
    return found


def token_advantages(
    name: str, groups: Sequence[Sequence[Rollout]], rewards: Sequence[FloatArray], credit: Credit
) -> FloatArray:
    """Return the advantage of every token of the step; the order is that of `Tokens`.

    The number has no meaning for a token that no policy sampled. `rewards` are those of the rollouts, for each group.
    """
    tokens = tokens_of(groups)
    found = np.zeros(len(tokens.sampled), np.float64)
    if credit.of == "rollout" or credit.outcome_weight:
        scale = 1.0 if credit.of == "rollout" else credit.outcome_weight
        whole = scale * _joined(advantages(name, rewards), np.float64)
        found = np.repeat(whole[tokens.rollouts], np.diff(tokens.bounds))
    if credit.of != "rollout":
        everyone = [rollout for rollouts in groups for rollout in rollouts]
        scores = finer_scores(everyone, tokens, credit.scorers)
        parts = segments(tokens, credit.of, scores)
        earned = returns(parts, _joined(rewards, np.float64), scores, credit.discount)
        values = _compared(name, earned, _likenesses(tokens, parts, credit.baseline))
        # Every sampled token is in one segment, and the segments are in the order of their tokens.
        found[tokens.sampled] += np.repeat(values, parts.ends - parts.starts)
    return found


def token_rewards(rollout: Rollout, reward: float, scorers: Mapping[str, float]) -> list[FloatArray]:
    """Return what every token of a rollout earns, for each trace: what a critic learns from.

    A score that is finer than the rollout is earned by the last sampled token that it is about, and the reward by the
    last trained token of each trace: to a critic, every trace is an episode. What was earned by tokens that are only
    kept as context stays with them: the trained tokens after them did not earn it.
    """
    tokens = tokens_of([[rollout]])
    scores = finer_scores([rollout], tokens, scorers)
    found = []
    for number, trace in enumerate(rollout.traces):
        earned = np.zeros(len(trace), np.float64)
        places = np.flatnonzero(_sampled(trace))
        if len(places):
            own = scores.traces == number
            last_scored = scores.ends[own] - tokens.bounds[number] - 1
            at = np.searchsorted(places, last_scored, side="right") - 1
            np.add.at(earned, places[np.maximum(at, 0)], scores.amounts[own])
        if trace.trained.any():
            earned[np.flatnonzero(trace.trained)[-1]] += reward
        found.append(earned)
    return found


def _compared(name: str, earned: FloatArray, sets: IntArray) -> FloatArray:
    """Return the advantages of segments, each compared with the others of its set. `sets` numbers the sets."""
    # A segment that is compared with no other has advantage 0. There may be one such set for every token.
    fewest = 2 if name in COMPARES else 1
    sizes = np.bincount(sets)
    order = np.argsort(sets, kind="stable")
    order = order[sizes[sets[order]] >= fewest]
    found = np.zeros(len(earned), np.float64)
    found[order] = advantages_of_sets(name, earned[order], sizes[sizes >= fewest])
    return found


def _likenesses(tokens: Tokens, parts: Segments, baseline: Baseline) -> IntArray:
    """Return a number for each segment: equal numbers for segments that are compared with each other.

    `position`: segments with the same number in their rollouts. `state`: segments before which the same context was
    read, such as the same answer of an environment. `prefix`: segments before which everything was the same. Segments
    of different groups are never compared. The numbers ascend in the order in which their sets are first met.
    """
    groups = tokens.groups[parts.rollouts]
    if baseline == "group" or not len(groups):
        return groups
    if baseline == "position":
        places = np.arange(len(groups)) - np.searchsorted(parts.rollouts, parts.rollouts)
        return np.asarray(groups * (1 + places.max()) + places, np.int64)
    if baseline == "state":
        known: dict[tuple[int, bytes], int] = {}
        states = zip(groups.tolist(), _contexts(tokens, parts), strict=True)
        return np.array([known.setdefault(state, len(known)) for state in states], np.int64)
    _, first, numbers = np.unique(_prefixes(tokens)[parts.starts], return_index=True, return_inverse=True)
    return np.asarray(np.argsort(np.argsort(first))[numbers], np.int64)


def _contexts(tokens: Tokens, parts: Segments) -> list[bytes]:
    """Return, for each segment, the tokens of its trace between the last sampled token before it and its start."""
    token_ids = _joined([trace.token_ids for trace in tokens.traces], np.int32)
    opened = tokens.bounds[_trace_at(tokens, parts.starts)]
    begins = np.maximum(opened, np.append(0, parts.ends[:-1]))
    return [token_ids[begin:end].tobytes() for begin, end in zip(begins.tolist(), parts.starts.tolist(), strict=True)]


def _prefixes(tokens: Tokens) -> IntArray:
    """Return a number for each token, which is equal for tokens of a group before which their traces are equal."""
    found = np.zeros(len(tokens.sampled), np.int64)
    keys = [
        (group, trace.token_ids.tobytes())
        for group, trace in zip(tokens.groups[tokens.rollouts].tolist(), tokens.traces, strict=True)
    ]
    width = 1 + max(len(trace) for trace in tokens.traces)
    group, before, owners = -1, np.zeros(0, np.int32), np.zeros(0, np.int64)
    # In this order, traces of a group with equal beginnings are side by side. The first of them owns the beginning.
    for number in sorted(range(len(keys)), key=keys.__getitem__):
        token_ids = tokens.traces[number].token_ids
        shared = 1 + _shared(before, token_ids) if keys[number][0] == group else 0
        # The owners of the beginnings of 0, 1, 2, ... tokens.
        owners = np.append(owners[:shared], np.full(1 + len(token_ids) - shared, number))
        found[tokens.bounds[number] : tokens.bounds[number + 1]] = owners[:-1] * width + np.arange(len(token_ids))
        group, before = keys[number][0], token_ids
    return found


def _shared(one: Int32Array, other: Int32Array) -> int:
    """Return the number of tokens at the beginning of both that are equal."""
    shorter = min(len(one), len(other))
    return int(np.append(one[:shorter] == other[:shorter], False).argmin())


def _trace_at(tokens: Tokens, places: IntArray) -> IntArray:
    """Return the numbers of the traces that hold the tokens at these positions of the step."""
    return np.asarray(np.searchsorted(tokens.bounds, places, side="right") - 1, np.int64)


def _sampled(trace: Trace) -> BoolArray:
    return np.asarray(trace.versions != NO_VERSION)


def _joined(arrays: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.zeros(0, dtype), *arrays])

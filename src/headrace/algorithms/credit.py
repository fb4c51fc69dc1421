"""Advantages of parts of a rollout, from scores that are finer than the rollout. No torch is imported here.

A rollout is cut into segments: its turns, its scored steps, or its single tokens. A segment earns the weighted scores
that end in it, and the last segment also earns the rollout's reward. The return of a segment is what the rollout earns
from there on, where each later segment counts `discount` times as much as the one before it. The returns of segments
that are like each other are compared by the same estimators that compare the rewards of whole rollouts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

import numpy as np

from headrace.algorithms.advantages import COMPARES, FloatArray, advantages
from headrace.types import NO_VERSION, BoolArray, Rollout, Trace

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


@dataclass(frozen=True)
class Segment:
    """Consecutive sampled tokens of a rollout, from position `start` up to, but not including, `end` of a trace."""

    trace: int
    start: int
    end: int


def segments(rollout: Rollout, of: Of) -> list[Segment]:
    """Return the segments of a rollout in their order, so that each sampled token is in exactly one of them.

    A turn is an unbroken run of sampled tokens. Steps end where scores of level `step` end, and where their turn ends.
    """
    found = []
    for number, trace in enumerate(rollout.traces):
        sampled = _sampled(trace)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], sampled, [False]]).astype(np.int8)))
        for start, end in edges.reshape(-1, 2).tolist():
            cuts = {end}
            if of == "step":
                ends = (score.end for score in rollout.scores if score.level == "step" and score.trace == number)
                cuts.update(at for at in ends if start < at < end)
            elif of == "token":
                cuts.update(range(start + 1, end))
            for cut in sorted(cuts):
                found.append(Segment(number, start, cut))
                start = cut
    return found


def returns(rollout: Rollout, reward: float, parts: Sequence[Segment], credit: Credit) -> FloatArray:
    """Return what the rollout earns from each of its segments on."""
    earned = np.zeros(len(parts), np.float64)
    if not len(parts):
        return earned
    starts = [(part.trace, part.start) for part in parts]
    for score in rollout.scores:
        if score.level != "rollout":
            # The segment that holds the last scored token, or the one before it if no policy sampled that token.
            at = bisect_right(starts, (score.trace, score.end - 1)) - 1
            earned[max(at, 0)] += credit.scorers.get(score.scorer, 1.0) * score.value
    earned[-1] += reward
    if credit.discount == 1.0:
        return np.cumsum(earned[::-1])[::-1]
    for number in range(len(parts) - 2, -1, -1):
        earned[number] += credit.discount * earned[number + 1]
    return earned


def token_advantages(
    name: str, groups: Sequence[Sequence[Rollout]], rewards: Sequence[FloatArray], credit: Credit
) -> list[list[list[FloatArray]]]:
    """Return the advantage of every token: for each group, rollout and trace, an array over the tokens of the trace.

    The number has no meaning for a token that no policy sampled. `rewards` are those of the rollouts, for each group.
    """
    whole = advantages(name, rewards) if credit.of == "rollout" or credit.outcome_weight else None
    scale = 1.0 if credit.of == "rollout" else credit.outcome_weight
    tokens = [
        [
            [np.full(len(trace), 0.0 if whole is None else scale * whole[g][r]) for trace in rollout.traces]
            for r, rollout in enumerate(rollouts)
        ]
        for g, rollouts in enumerate(groups)
    ]
    if credit.of != "rollout":
        _add_segments(tokens, name, groups, rewards, credit)
    return tokens


def token_rewards(rollout: Rollout, reward: float, scorers: Mapping[str, float]) -> list[FloatArray]:
    """Return what every token of a rollout earns, for each trace: what a critic learns from.

    A score that is finer than the rollout is earned by the last sampled token that it is about, and the reward by the
    last trained token of each trace: to a critic, every trace is an episode. What was earned by tokens that are only
    kept as context stays with them: the trained tokens after them did not earn it.
    """
    found = []
    for number, trace in enumerate(rollout.traces):
        earned = np.zeros(len(trace), np.float64)
        places = np.flatnonzero(_sampled(trace))
        if len(places):
            for score in rollout.scores:
                if score.level != "rollout" and score.trace == number:
                    at = max(int(np.searchsorted(places, score.end - 1, side="right")) - 1, 0)
                    earned[places[at]] += scorers.get(score.scorer, 1.0) * score.value
        if trace.trained.any():
            earned[np.flatnonzero(trace.trained)[-1]] += reward
        found.append(earned)
    return found


def _add_segments(
    tokens: Sequence[Sequence[Sequence[FloatArray]]],
    name: str,
    groups: Sequence[Sequence[Rollout]],
    rewards: Sequence[FloatArray],
    credit: Credit,
) -> None:
    """Add the advantage of each segment to the advantages of its tokens."""
    alike: dict[tuple[int, object], list[tuple[FloatArray, float]]] = {}
    for g, rollouts in enumerate(groups):
        for r, rollout in enumerate(rollouts):
            parts = segments(rollout, credit.of)
            earned = returns(rollout, float(rewards[g][r]), parts, credit).tolist()
            likenesses = _likenesses(rollout, parts, credit.baseline)
            for part, value, likeness in zip(parts, earned, likenesses, strict=True):
                place = tokens[g][r][part.trace][part.start : part.end]
                alike.setdefault((g, likeness), []).append((place, value))
    if name in COMPARES:
        # A segment that is compared with no other has advantage 0. There may be one such set for every token.
        alike = {key: members for key, members in alike.items() if len(members) > 1}
    compared = [np.array([value for _, value in members], np.float64) for members in alike.values()]
    for members, values in zip(alike.values(), advantages(name, compared), strict=True):
        for (place, _), value in zip(members, values, strict=True):
            place += value


def _likenesses(rollout: Rollout, parts: Sequence[Segment], baseline: Baseline) -> Sequence[object]:
    """Return a key for each segment, which is equal for segments of a group that are compared with each other.

    `position`: segments with the same number in their rollouts. `state`: segments before which the same context was
    read, such as the same answer of an environment. `prefix`: segments before which everything was the same.
    """
    if baseline == "group":
        return [None] * len(parts)
    if baseline == "position":
        return range(len(parts))
    if baseline == "state":
        return [_context_before(rollout.traces[part.trace], part.start) for part in parts]
    found, trace, done = [], -1, 0
    for part in parts:
        if part.trace != trace:
            read, trace, done = blake2b(digest_size=16), part.trace, 0
        # A digest that goes on from segment to segment: whole prefixes would take memory by the square of the length.
        read.update(rollout.traces[trace].token_ids[done : part.start].tobytes())
        done = part.start
        found.append(read.digest())
    return found


def _context_before(trace: Trace, start: int) -> bytes:
    """Return the tokens between the last sampled token before this position and the position."""
    earlier = np.flatnonzero(_sampled(trace)[:start])
    begin = int(earlier[-1]) + 1 if len(earlier) else 0
    return trace.token_ids[begin:start].tobytes()


def _sampled(trace: Trace) -> BoolArray:
    return np.asarray(trace.versions != NO_VERSION)

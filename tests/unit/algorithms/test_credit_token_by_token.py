"""Advantages and rewards of tokens in float64, against plain loops over single tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms.credit import Credit, token_advantages, token_rewards
from headrace.types import NO_VERSION, Rollout, Score, Trace

WEIGHTS = {"a": 2.0, "b": -0.5}
EIGHTHS = st.integers(-40, 40).map(lambda n: n / 8)
TOLERANCE = 1e-12


@st.composite
def traces(draw):
    """Sampled and other tokens in any order. There are two different tokens only, so beginnings are often equal."""
    kinds = draw(st.lists(st.sampled_from(["context", "kept", "trained", "trained"]), max_size=10))
    return Trace(
        token_ids=np.array([draw(st.integers(0, 1)) for _ in kinds], np.int32),
        trained=np.array([kind == "trained" for kind in kinds], np.bool_),
        logprobs=np.zeros(len(kinds), np.float32),
        versions=np.array([NO_VERSION if kind == "context" else 3 for kind in kinds], np.int32),
    )


@st.composite
def rollouts(draw):
    own = draw(st.lists(traces(), max_size=3))
    spans = [(t, i) for t, one in enumerate(own) for i in range(len(one))]
    scores = [Score(value=draw(EIGHTHS))]
    for trace, last in draw(st.lists(st.sampled_from(spans), max_size=6)) if spans else []:
        level, scorer = draw(st.sampled_from(["turn", "step", "step", "token"])), draw(st.sampled_from("abc"))
        start = draw(st.integers(0, last))
        value = draw(EIGHTHS)
        scores.append(Score(value=value, level=level, scorer=scorer, trace=trace, start=start, end=last + 1))
    return Rollout(id="1/0", index=0, traces=own, ending="finished", reward=draw(EIGHTHS), scores=scores)


CREDITS = st.builds(
    Credit,
    of=st.sampled_from(["turn", "step", "token"]),
    discount=st.sampled_from([1.0, 0.9, 0.5, 0.0]),
    baseline=st.sampled_from(["group", "position", "state", "prefix"]),
    outcome_weight=st.sampled_from([0.0, 0.75]),
    scorers=st.just(WEIGHTS),
)


@given(
    st.lists(st.lists(rollouts(), max_size=4), max_size=3),
    CREDITS,
    st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce_plus_plus"]),
)
def test_advantages(groups, credit, name):
    rewards = [np.array([rollout.reward for rollout in group], np.float64) for group in groups]
    found = token_advantages(name, groups, rewards, credit)
    everyone = [(g, r, rollout) for g, group in enumerate(groups) for r, rollout in enumerate(group)]
    places = [(g, r, t, i) for g, r, each in everyone for t, one in enumerate(each.traces) for i in range(len(one))]
    assert found.shape == (len(places),)
    sets, segment_of = {}, {}
    for g, r, rollout in everyone:
        parts = plain_segments(rollout, credit.of)
        for k, (part, value) in enumerate(zip(parts, plain_returns(rollout, parts, credit.discount), strict=True)):
            key = (g, plain_key(rollout, part[0], k, credit.baseline))
            sets.setdefault(key, {})[g, r, k] = value
            segment_of.update({(g, r, *token): (key, (g, r, k)) for token in part})
    outcomes = {(g,): {(g, r): rollout.reward for g_, r, rollout in everyone if g_ == g} for g in range(len(groups))}
    of_segment, of_rollout = plain_advantages(sets, name), plain_advantages(outcomes, name)
    for place, value in zip(places, found.tolist(), strict=True):
        if place in segment_of:
            _, segment = segment_of[place]
            own, error = of_segment[segment]
            whole, error_of_whole = of_rollout[place[:2]]
            weight = credit.outcome_weight
            assert value == pytest.approx(own + weight * whole, rel=TOLERANCE, abs=error + weight * error_of_whole)


@given(rollouts())
def test_rewards_of_tokens(rollout):
    found = token_rewards(rollout, rollout.reward, WEIGHTS)
    assert len(found) == len(rollout.traces)
    for t, (one, earned) in enumerate(zip(rollout.traces, found, strict=True)):
        expected = [0.0] * len(one)
        sampled = [i for i in range(len(one)) if one.versions[i] != NO_VERSION]
        for score in rollout.scores:
            if score.level != "rollout" and score.trace == t and sampled:
                before = [i for i in sampled if i < score.end]
                expected[before[-1] if before else sampled[0]] += WEIGHTS.get(score.scorer, 1.0) * score.value
        if one.trained.any():
            expected[max(i for i in range(len(one)) if one.trained[i])] += rollout.reward
        assert earned.tolist() == expected


def plain_segments(rollout, of):
    """The segments as lists of (trace, position)."""
    sampled = [(t, i) for t, one in enumerate(rollout.traces) for i in range(len(one)) if one.versions[i] != NO_VERSION]
    ends = {(score.trace, score.end) for score in rollout.scores if score.level == "step"}
    found = [[token] for token in sampled[:1]]
    for (t, i), token in pairwise(sampled):
        if token == (t, i + 1) and of != "token" and not (of == "step" and token in ends):
            found[-1].append(token)
        else:
            found.append([token])
    return found


def plain_returns(rollout, parts, discount):
    earned = [0.0] * len(parts)
    for score in rollout.scores if parts else []:
        if score.level != "rollout":
            begun = [k for k, part in enumerate(parts) if part[0] < (score.trace, score.end)]
            earned[begun[-1] if begun else 0] += WEIGHTS.get(score.scorer, 1.0) * score.value
    found, later = [], 0.0
    for k in reversed(range(len(parts))):
        later = earned[k] + (rollout.reward if k == len(parts) - 1 else 0.0) + discount * later
        found.insert(0, later)
    return found


def plain_key(rollout, first, number, baseline):
    t, start = first
    one = rollout.traces[t]
    read = start
    while read > 0 and one.versions[read - 1] == NO_VERSION:
        read -= 1
    ids = one.token_ids.tolist()
    return {"group": 0, "position": number, "state": tuple(ids[read:start]), "prefix": tuple(ids[:start])}[baseline]


def plain_advantages(sets, name):
    """The advantage of every member of a set, and the rounding that an advantage may have."""
    if name == "reinforce_plus_plus":
        sets = {0: {member: value for members in sets.values() for member, value in members.items()}}
    found = {}
    for members in sets.values():
        values = list(members.values())
        for member, value in members.items():
            others = [other for each, other in members.items() if each != member]
            spread = 1.0
            if not others:
                advantage = 0.0
            elif name == "rloo":
                advantage = value - math.fsum(others) / len(others)
            else:
                mean = math.fsum(values) / len(values)
                if name != "dr_grpo":
                    spread = math.sqrt(math.fsum((each - mean) ** 2 for each in values) / len(values)) + 1e-6
                advantage = (value - mean) / spread
            found[member] = (advantage, TOLERANCE * max(1.0, *map(abs, values)) / min(spread, 1.0))
    return found

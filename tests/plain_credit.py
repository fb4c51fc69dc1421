"""Random groups with scores of turns, steps and tokens, and their advantages by the definition, token by token."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from headrace.types import NO_VERSION, Group, Prompt, Rollout, Score, Trace


def random_group(rng: np.random.Generator, number: int, size: int = 4) -> Group:
    """Rollouts of one or two traces of several turns. The first one has no token; some begin with salvaged tokens."""
    made = [Rollout(id=f"{number}/0", index=0, traces=[context(1)], ending="finished", reward=float(rng.normal()))]
    for index in range(1, size):
        traces = [_random_trace(rng) for _ in range(int(rng.integers(1, 3)))]
        scores = [
            Score(value=float(rng.normal()), scorer="steps", trace=t, start=0, end=int(place) + 1, level=level)
            for t, one in enumerate(traces)
            for place in np.flatnonzero(one.versions != NO_VERSION)
            if rng.random() < 0.4
            for level in [("turn", "step", "token")[int(rng.integers(3))]]
        ]
        ending = "truncated" if rng.random() < 0.2 else "finished"
        reward = float(rng.normal())
        made.append(
            Rollout(id=f"{number}/{index}", index=index, traces=traces, ending=ending, reward=reward, scores=scores)
        )
    return Group(id=number, prompt=Prompt(id=str(number), text="a"), version=3, rollouts=made)


def context(*tokens: int) -> Trace:
    return Trace.of_context(np.array(tokens, np.int32))


def _random_trace(rng: np.random.Generator) -> Trace:
    made = context(1, 2)
    for turn in range(int(rng.integers(1, 4))):
        if turn:
            made = Trace.joined([made, context(int(rng.integers(30, 32)))])
        count = int(rng.integers(1, 6))
        sampled = rng.integers(10, 12, count).astype(np.int32)
        logprobs = (rng.normal(size=count) - np.log(61)).astype(np.float32)
        made = made.extended(sampled, logprobs, np.full(count, 3, np.int32), trained=True)
    if rng.random() < 0.3:
        made.trained[2] = False
    return made


def plain_advantages(
    groups: Sequence[Group], of: str, gamma: float, like: str, outcome: float, name: str
) -> dict[tuple[int, int, int, int], float]:
    """(group, rollout, trace, position) of every sampled token -> its advantage."""
    found, sets, whole = {}, {}, {}
    for g in groups:
        for r in g.rollouts:
            whole.setdefault(g.id, []).append(r.reward)
            tokens = [
                (t, i) for t, one in enumerate(r.traces) for i in range(len(one)) if one.versions[i] != NO_VERSION
            ]
            if not tokens:
                continue
            ends = {(s.trace, s.end - 1) for s in r.scores if s.level == "step"}
            number, numbers = 0, {}
            for place, (t, i) in enumerate(tokens):
                numbers[t, i] = number
                last = place + 1 == len(tokens) or tokens[place + 1] != (t, i + 1)
                number += last or of == "token" or (of == "step" and (t, i) in ends)
            earned = [0.0] * number
            earned[-1] = r.reward
            for s in r.scores:
                earned[numbers[s.trace, s.end - 1]] += s.value
            for (t, i), k in numbers.items():
                value = sum(gamma ** (j - k) * earned[j] for j in range(k, number))
                start = min(p for (u, p), n in numbers.items() if n == k and u == t)
                ids = r.traces[t].token_ids.tolist()
                read = start
                while read and r.traces[t].versions[read - 1] == NO_VERSION:
                    read -= 1
                key = {"group": 0, "position": k, "prefix": tuple(ids[:start]), "state": tuple(ids[read:start])}[like]
                sets.setdefault((g.id, key), {})[r.index, k] = value
                found[g.id, r.index, t, i] = (key, k)
    result = {}
    for (g, r, t, i), (key, k) in found.items():
        rewards = whole[g]
        part = _compared(list(sets[g, key].values()), sets[g, key][r, k], name)
        result[g, r, t, i] = part + outcome * _compared(rewards, rewards[r], name)
    return result


def _compared(members: list[float], own: float, name: str) -> float:
    if len(set(members)) == 1:
        return 0.0
    spread = statistics.pstdev(members) + 1e-6 if name == "grpo" else 1.0
    if name == "rloo":
        others = [*members]
        others.remove(own)
        return own - statistics.fmean(others)
    return (own - statistics.fmean(members)) / spread

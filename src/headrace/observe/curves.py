"""The curves of a run: what a step's answers say about learning, and how busy the processes were. Pure arithmetic.

The same numbers, under the same names, go to `metrics.jsonl`, to the trackers, to the journal and to the report.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from headrace.types import Group, Rollout

MOST_NAMES = 64
"""A reward function may invent a name for each answer. At most this many names of scores, and of extra numbers, are
kept in a step."""


def of_answers(groups: Sequence[Group], logprobs: npt.NDArray[np.float32]) -> dict[str, float | int | None]:
    """Return the curves of the answers that a step trains. `logprobs` are those of the step's sampled tokens."""
    answers = [rollout for group in groups for rollout in group.usable]
    rewards = [rewards_of(group) for group in groups]
    flat = [reward for each in rewards for reward in each]
    compared = [each for each in rewards if len(each) > 1]
    lengths = [rollout.sampled_tokens for rollout in answers]
    return {
        "reward_min": min(flat, default=None),
        "reward_max": max(flat, default=None),
        "reward_std": _mean(float(np.std(each)) for each in compared),
        "zero_variance": _mean(float(min(each) == max(each)) for each in compared),
        "length_mean": _mean(lengths),
        "length_max": max(lengths, default=None),
        "truncated": _mean(float(rollout.ending == "truncated") for rollout in answers),
        # The mean surprise of sampled tokens is an unbiased estimate of the entropy of what they were sampled from.
        "sampled_entropy": -float(np.mean(logprobs, dtype=np.float64)) if len(logprobs) else None,
        **_means("score", (_scores(rollout) for rollout in answers)),
        **_means("extra", (rollout.metrics for rollout in answers)),
    }


def of_tasks(groups: Sequence[Group]) -> dict[str, float | int | None]:
    """Return the curves of each task whose answers a step trains, after its name; empty if the run has one task."""
    curves: dict[str, float | int | None] = {}
    for name in sorted({group.prompt.task for group in groups} - {""}):
        own = [group for group in groups if group.prompt.task == name]
        traces = [trace for group in own for rollout in group.usable for trace in rollout.traces]
        logprobs = np.concatenate([np.zeros(0, np.float32), *(trace.logprobs[trace.trained] for trace in traces)])
        found = {
            "groups": len(own),
            "reward": _mean(reward for group in own for reward in rewards_of(group)),
            **of_answers(own, logprobs),
        }
        # The name of a task's own scorer begins with the name of the task, which is said once.
        curves |= {f"{name}/{key.replace(f'score/{name}/', 'score/', 1)}": value for key, value in found.items()}
    return curves


def rewards_of(group: Group) -> list[float]:
    """Return the rewards of a group's answers, without those of failed ones."""
    return [rollout.reward for rollout in group.usable if rollout.reward is not None]


def _scores(rollout: Rollout) -> dict[str, float]:
    """Return what each scorer gave to the whole rollout and, as `NAME/step` and so on, the mean over its parts."""
    found: dict[str, float] = {}
    parts: dict[str, list[float]] = {}
    for score in rollout.scores:
        if score.level == "rollout":
            found[score.scorer] = found.get(score.scorer, 0.0) + score.value
        else:
            parts.setdefault(f"{score.scorer}/{score.level}", []).append(score.value)
    return found | {name: float(np.mean(values)) for name, values in parts.items()}


def _means(kind: str, answers: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return, for each name, the mean over the answers that have a number of this name."""
    found: dict[str, list[float]] = {}
    for numbers in answers:
        for name, value in numbers.items():
            if name in found or len(found) < MOST_NAMES:
                found.setdefault(name, []).append(float(value))
    return {f"{kind}/{name}": float(np.mean(values)) for name, values in sorted(found.items())}


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return float(np.mean(found)) if found else None


class Pace:
    """The idle shares of engines and trainers, and the tokens per second, between two steps.

    Heartbeats come twice a second. A step during which none came has the shares of the step before it.
    """

    def __init__(self) -> None:
        self._start(None)
        self._last: dict[str, float | None] = dict.fromkeys(("trainer_idle", "engine_idle", "generated_per_second"))

    def beat(self, process: str, seconds: float, busy: float, generated: int) -> None:
        """Take what a process did in an interval of this many seconds."""
        role = process.partition("-")[0]
        if role not in self._busy:
            return
        self._busy[role] += busy
        self._seconds[role] += seconds
        if role == "engine":
            self._engines.add(process)
            self._generated += generated

    def begin(self, now: float) -> None:
        """Start to count, unless counting has begun: before the first step nothing is trained or generated."""
        if self._since is None:
            self._start(now)

    def step(self, now: float, trained_tokens: int) -> dict[str, float | None]:
        """Return the curves of the time since the step before this one."""
        for role, seconds in self._seconds.items():
            if seconds > 0:
                self._last[f"{role}_idle"] = min(1.0, max(0.0, 1.0 - self._busy[role] / seconds))
        if self._seconds["engine"] > 0:
            self._last["generated_per_second"] = self._generated * len(self._engines) / self._seconds["engine"]
        taken = None if self._since is None else now - self._since
        self._start(now)
        return {**self._last, "tokens_per_second": trained_tokens / taken if taken else None}

    def _start(self, now: float | None) -> None:
        self._busy = {"trainer": 0.0, "engine": 0.0}
        self._seconds = {"trainer": 0.0, "engine": 0.0}
        self._engines: set[str] = set()
        self._generated = 0
        self._since = now

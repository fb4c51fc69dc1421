"""Evaluation on held-out prompts, beside training. A bounded number of episodes is in flight; none enters the buffer.

Results are ordered by prompt and sample, never by arrival. A failed rollout counts as a wrong answer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence

import msgspec

from headrace.rollouts.base import AnyEpisode
from headrace.rollouts.groups import run_episode
from headrace.scoring.base import Scoring
from headrace.types import Prompt, Rollout

SHOWN = 8
"""The number of answers kept for people to read."""


class EvaluatedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out prompt and the policy's answer to it."""

    prompt: str
    """The prompt's id."""
    question: str
    answer: str
    reward: float


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """How well the policy answers the held-out prompts."""

    prompts: int
    samples: int
    """The number of answers per prompt."""
    pass_1: float
    """The chance that one answer is right, which means that its reward is at least 1."""
    pass_k: float
    """The chance that at least one of k answers is right."""
    k: int
    reward_mean: float
    tokens_mean: float
    """The mean number of sampled tokens of an answer."""
    failed: int
    """The number of rollouts that failed. They count as wrong."""
    answers: list[EvaluatedAnswer] = []


async def evaluate(
    prompts: Sequence[Prompt],
    make_episode: Callable[[Prompt, int], AnyEpisode],
    scoring: Scoring,
    *,
    samples: int = 1,
    concurrency: int = 64,
    k: int | None = None,
    shown: int = SHOWN,
) -> EvaluationResult:
    """Answer every prompt `samples` times, with `concurrency` episodes at a time. `k` is `samples` unless given."""
    k = samples if k is None else k
    if not prompts:
        raise ValueError("there is no prompt to evaluate")
    if not 1 <= k <= samples or concurrency < 1:
        raise ValueError(f"cannot take pass@{k} of {samples} samples with {concurrency} episodes in flight")

    rollouts: dict[tuple[int, int], Rollout] = {}
    answers: dict[int, EvaluatedAnswer] = {}
    remaining = ((p, prompt, sample) for p, prompt in enumerate(prompts) for sample in range(samples))

    async def work(remaining: Iterator[tuple[int, Prompt, int]]) -> None:
        for p, prompt, sample in remaining:
            episode = make_episode(prompt, sample)
            rollout = rollouts[p, sample] = await _complete(episode, scoring)
            if p < shown and sample == 0:
                answers[p] = _answer(prompt, episode, rollout)

    async with asyncio.TaskGroup() as tasks:
        for number in range(min(concurrency, len(prompts) * samples)):
            tasks.create_task(work(remaining), name=f"evaluate {number}")

    right = [sum(is_right(rollouts[p, sample]) for sample in range(samples)) for p in range(len(prompts))]
    return EvaluationResult(
        prompts=len(prompts),
        samples=samples,
        pass_1=math.fsum(pass_at_k(samples, c, 1) for c in right) / len(prompts),
        pass_k=math.fsum(pass_at_k(samples, c, k) for c in right) / len(prompts),
        k=k,
        reward_mean=math.fsum(_reward(rollout) for rollout in rollouts.values()) / len(rollouts),
        tokens_mean=sum(rollout.trained_tokens for rollout in rollouts.values()) / len(rollouts),
        failed=sum(rollout.ending == "failed" for rollout in rollouts.values()),
        answers=[answers[p] for p in sorted(answers)],
    )


def is_right(rollout: Rollout) -> bool:
    """Return whether an answer is right: its reward is at least 1. A failed answer is wrong."""
    return _reward(rollout) >= 1.0


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the chance that k answers, drawn without replacement from n answers, contain a right one.

    `right` of the n answers are right. This is an unbiased estimate of pass@k from n >= k samples:

        1 - C(n - right, k) / C(n, k)
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


async def _complete(episode: AnyEpisode, scoring: Scoring) -> Rollout:
    try:
        await episode.prepare()
        return await run_episode(episode, scoring)
    finally:
        await episode.discard()


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.ending == "failed" or rollout.reward is None else rollout.reward


def _answer(prompt: Prompt, episode: AnyEpisode, rollout: Rollout) -> EvaluatedAnswer:
    question = prompt.text if prompt.text is not None else (prompt.messages or [{}])[-1].get("content", "")
    answer = rollout.reason if rollout.ending == "failed" else episode.answer
    return EvaluatedAnswer(prompt=prompt.id, question=question, answer=answer, reward=_reward(rollout))

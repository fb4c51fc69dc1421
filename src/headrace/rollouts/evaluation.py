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
from headrace.scoring.base import Stage
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
    """The share of prompts of which at least one answer is right."""
    reward_mean: float
    tokens_mean: float
    """The mean number of sampled tokens of an answer."""
    failed: int
    """The number of rollouts that failed. They count as wrong."""
    answers: list[EvaluatedAnswer] = []


async def evaluate(
    prompts: Sequence[Prompt],
    make_episode: Callable[[Prompt, int], AnyEpisode],
    scoring: Stage,
    *,
    samples: int = 1,
    concurrency: int = 64,
) -> EvaluationResult:
    """Answer every prompt `samples` times, with `concurrency` episodes at a time. There must be a prompt."""
    rollouts: dict[tuple[int, int], Rollout] = {}
    answers: dict[int, EvaluatedAnswer] = {}
    remaining = ((p, prompt, sample) for p, prompt in enumerate(prompts) for sample in range(samples))

    async def work(remaining: Iterator[tuple[int, Prompt, int]]) -> None:
        for p, prompt, sample in remaining:
            episode = make_episode(prompt, sample)
            try:
                await episode.prepare()
                rollout = rollouts[p, sample] = await run_episode(episode, scoring)
            finally:
                await episode.discard()
            if p < SHOWN and sample == 0:
                question = prompt.text if prompt.text is not None else (prompt.messages or [{}])[-1].get("content", "")
                answer = rollout.reason if rollout.ending == "failed" else episode.answer
                answers[p] = EvaluatedAnswer(
                    prompt=prompt.id, question=question, answer=answer, reward=_reward(rollout)
                )

    async with asyncio.TaskGroup() as tasks:
        for number in range(min(concurrency, len(prompts) * samples)):
            tasks.create_task(work(remaining), name=f"evaluate {number}")

    right = [sum(_reward(rollouts[p, sample]) >= 1.0 for sample in range(samples)) for p in range(len(prompts))]
    return EvaluationResult(
        prompts=len(prompts),
        samples=samples,
        pass_1=sum(right) / len(rollouts),
        pass_k=sum(count > 0 for count in right) / len(prompts),
        reward_mean=math.fsum(_reward(rollout) for rollout in rollouts.values()) / len(rollouts),
        tokens_mean=sum(rollout.trained_tokens for rollout in rollouts.values()) / len(rollouts),
        failed=sum(rollout.ending == "failed" for rollout in rollouts.values()),
        answers=[answers[p] for p in sorted(answers)],
    )


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.ending == "failed" or rollout.reward is None else rollout.reward

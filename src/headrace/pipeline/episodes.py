"""This module makes episodes from prompts, and evaluates versions on held-out prompts.

Training and held-out prompts share one task, one chat format and one pool.

The seed of a rollout depends only on (run seed, group, index), so the same attempt samples the same noise wherever and
whenever it runs.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from headrace.engines.base import Sampling
from headrace.gateway.base import GATEWAY_DIED
from headrace.observe.records import EvaluationRecord, SampleRecord
from headrace.pipeline.parts import Parts
from headrace.rollouts.base import AnyEpisode, EpisodePlan, derive_seed
from headrace.rollouts.groups import run_episode
from headrace.rollouts.turns import Episode
from headrace.scoring.base import Stage
from headrace.tasks.base import Budgeted
from headrace.types import Group, Prompt, Rollout, Trace

Moment = Literal["before", "during", "after"]
HELDOUT_PRIORITY = 1
"""Held-out requests come after training requests: an evaluation fills gaps and never delays training."""
EVALUATION_SHARE = 4
"""An evaluation during training uses at most one in `EVALUATION_SHARE` slots of the engines."""
SHOWN = 8
"""The number of held-out answers kept for people to read."""


class Episodes:
    """The maker of episodes, as the configuration describes them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._stop_tokens = tuple(parts.chat.token_id(token) for token in parts.config.rollouts.stop)

    def of_group(
        self,
        group: Group,
        members: Iterable[int],
        *,
        prefixes: Mapping[int, Trace] | None = None,
        saved: Mapping[str, Sequence[Trace]] | None = None,
    ) -> list[AnyEpisode]:
        """Make the episodes of a group's members, by index.

        `prefixes` holds tokens of an earlier attempt, by index; `saved` holds traces of a previous process, by rollout.
        """
        rollouts = self._config.rollouts
        return [
            self._make(
                EpisodePlan(
                    id=f"{group.id}/{index}",
                    index=index,
                    prompt=group.prompt,
                    sampling=self._sampling(str(group.id), index, rollouts.temperature, rollouts.truncates),
                    group=str(group.id),
                    max_turns=rollouts.max_turns,
                    max_length=self._parts.max_length,
                    keep_routing=rollouts.keep_routing,
                    prefix=(prefixes or {}).get(index),
                    saved=(saved or {}).get(f"{group.id}/{index}", ()),
                )
            )
            for index in members
        ]

    def heldout(self, prompt: Prompt, sample: int, version: int) -> AnyEpisode:
        """Make the episode for one answer to a held-out prompt."""
        name = f"heldout-{version}/{prompt.id}"
        return self._make(
            EpisodePlan(
                id=f"{name}/{sample}",
                index=sample,
                prompt=prompt,
                sampling=self._sampling(name, sample, self._config.evaluate.temperature),
                group=name,
                priority=HELDOUT_PRIORITY,
                max_turns=self._config.rollouts.max_turns,
                max_length=self._parts.max_length,
            )
        )

    def _sampling(self, group: str, index: int, temperature: float, record_kept: bool = False) -> Sampling:
        rollouts = self._config.rollouts
        return Sampling(
            max_tokens=rollouts.max_tokens,
            temperature=temperature,
            top_k=rollouts.top_k,
            top_p=rollouts.top_p,
            min_p=rollouts.min_p,
            seed=derive_seed(self._config.run.seed, group, index),
            stop_token_ids=self._stop_tokens,
            record_kept=record_kept,
        )

    def _make(self, plan: EpisodePlan) -> AnyEpisode:
        if self._parts.agents is not None:
            return self._parts.agents(plan, self._parts.scoring)
        environment = self._parts.task.episode(plan.prompt)
        if isinstance(environment, Budgeted):
            own = min(environment.max_tokens, plan.sampling.max_tokens)
            plan = replace(plan, sampling=msgspec.structs.replace(plan.sampling, max_tokens=own))
        return Episode(plan, environment, self._parts.pool, self._parts.chat, self._parts.scoring)


class Evaluations:
    """The schedule of evaluations. An evaluation is of one version; one runs at a time.

    During training an evaluation uses a part of the engines' slots. A synchronous run evaluates between two versions,
    so the evaluation uses all slots.
    """

    def __init__(self, parts: Parts, episodes: Episodes) -> None:
        self._parts = parts
        self._config = parts.config.evaluate
        self._episodes = episodes
        self._synchronous = parts.window.depth == 0
        self._running: asyncio.Task[None] | None = None

    async def proved(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate this version in `tasks` if that is due. The engines hold the version, and it is not the last."""
        due = self._config.every and self._parts.window.count(version) % self._config.every == 0
        if due and not self._parts.stopping.is_set() and (self._running is None or self._running.done()):
            self._running = tasks.create_task(self.evaluate("during", version), name="evaluate")
        if self._synchronous and self._running is not None:
            # Held-out requests must not mix with requests of the next version: they would change its schedule.
            await self._running

    async def evaluate(self, moment: Moment, version: int) -> None:
        """Answer the held-out prompts and record the result, unless the run is stopped meanwhile."""
        recorder, waits = self._parts.recorder, self._parts.waits
        prompts: Sequence[Prompt] = self._parts.task.heldout
        if not prompts or self._parts.stopping.is_set():
            return
        if moment == "during":
            prompts = prompts[: self._config.during or None]
        else:
            recorder.shown.phase = "evaluating"
        slots = self._parts.config.engine.slots * self._parts.config.engine.processes
        if moment == "during" and not self._synchronous:
            slots = max(1, slots // EVALUATION_SHARE)
        evaluation = asyncio.create_task(
            evaluate(
                prompts,
                lambda prompt, sample: self._episodes.heldout(prompt, sample, version),
                self._parts.scoring,
                version=version,
                moment=moment,
                now=recorder.now,
                samples=self._config.samples,
                concurrency=slots,
            )
        )
        evaluation.add_done_callback(lambda _: waits.moved())
        try:
            await waits.until(
                "evaluate",
                lambda: f"{len(prompts)} held-out prompts",
                lambda: evaluation.done() or self._parts.stopping.is_set(),
            )
            if evaluation.done():
                recorder.evaluated(*evaluation.result())
        finally:
            evaluation.cancel()


async def evaluate(
    prompts: Sequence[Prompt],
    make_episode: Callable[[Prompt, int], AnyEpisode],
    scoring: Stage,
    *,
    version: int,
    moment: Moment,
    now: Callable[[], float],
    samples: int = 1,
    concurrency: int = 64,
) -> tuple[EvaluationRecord, list[SampleRecord], int]:
    """Answer every prompt `samples` times, with `concurrency` episodes at a time. There must be a prompt.

    Return the figures, the first answers to read, and the number of failed rollouts, which count as wrong answers. The
    results are ordered by prompt and sample, never by arrival. No rollout enters the buffer.
    """
    started = now()
    rollouts: dict[tuple[int, int], Rollout] = {}
    answers: dict[int, SampleRecord] = {}
    waiting = deque((p, prompt, sample) for p, prompt in enumerate(prompts) for sample in range(samples))

    async def work() -> None:
        while waiting:
            p, prompt, sample = waiting.popleft()
            episode = make_episode(prompt, sample)
            try:
                await episode.prepare()
                rollout = rollouts[p, sample] = await run_episode(episode, scoring)
            finally:
                await episode.discard()
            if rollout.reason.startswith(GATEWAY_DIED):
                waiting.appendleft((p, prompt, sample))  # Nothing was wrong with the answer, so it is asked for again.
                continue
            if p < SHOWN and sample == 0:
                question = prompt.text if prompt.text is not None else (prompt.messages or [{}])[-1].get("content", "")
                answers[p] = SampleRecord(
                    version=version,
                    moment=moment,
                    prompt=prompt.id,
                    question=question,
                    answer=rollout.reason if rollout.ending == "failed" else episode.answer,
                    reward=_reward(rollout),
                )

    async with asyncio.TaskGroup() as tasks:
        for number in range(min(concurrency, len(prompts) * samples)):
            tasks.create_task(work(), name=f"evaluate {number}")

    # An answer is right if its reward is at least 1.
    right = [sum(_reward(rollouts[p, sample]) >= 1.0 for sample in range(samples)) for p in range(len(prompts))]
    evaluation = EvaluationRecord(
        version=version,
        moment=moment,
        prompts=len(prompts),
        samples=samples,
        pass_1=sum(right) / len(rollouts),
        pass_k=sum(count > 0 for count in right) / len(prompts),
        reward_mean=math.fsum(_reward(rollout) for rollout in rollouts.values()) / len(rollouts),
        tokens_mean=sum(rollout.trained_tokens for rollout in rollouts.values()) / len(rollouts),
        started=started,
        ended=now(),
    )
    failed = sum(rollout.ending == "failed" for rollout in rollouts.values())
    return evaluation, [answers[p] for p in sorted(answers)], failed


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.ending == "failed" or rollout.reward is None else rollout.reward

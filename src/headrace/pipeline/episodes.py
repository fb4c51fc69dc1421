"""This module makes episodes from prompts, and evaluates versions on held-out prompts.

Training and held-out prompts share one task, one chat format and one pool.

The seed of a rollout depends only on (run seed, group, index), so the same attempt samples the same noise wherever and
whenever it runs.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np

from headrace.engines.base import Sampling
from headrace.gateway.base import GATEWAY_DIED
from headrace.observe.records import EvaluationRecord, SampleRecord
from headrace.pipeline.parts import Parts
from headrace.pipeline.versions import Deliveries
from headrace.rollouts.base import AnyEpisode, EpisodePlan, derive_seed
from headrace.rollouts.groups import run_episode
from headrace.rollouts.turns import Episode
from headrace.scoring.base import Stage
from headrace.types import NO_VERSION, Group, Prompt, Rollout, Trace

Moment = Literal["before", "during", "after"]
HELDOUT_PRIORITY = -1
"""Held-out requests come before training requests: their engines take no new version until they have ended."""
EVALUATION_SHARE = 4
"""An evaluation during training holds at least one engine, and one in `EVALUATION_SHARE`. It uses at most one in
`EVALUATION_SHARE` slots of all engines."""
STOPPED = "the run was stopped"
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
                version=version,
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
        own: int | None = getattr(environment, "max_tokens", None)
        if own is not None and own < plan.sampling.max_tokens:
            plan = replace(plan, sampling=msgspec.structs.replace(plan.sampling, max_tokens=own))
        return Episode(plan, environment, self._parts.pool, self._parts.chat, self._parts.scoring)


class Evaluations:
    """The schedule of evaluations. One runs at a time, and its engines are held at the one version that it evaluates.

    If no engine holds the version any more, because engines have died, the evaluation begins again with the newest
    version. An evaluation that is due and has no result is recorded, with the reason.
    """

    def __init__(self, parts: Parts, episodes: Episodes, deliveries: Deliveries) -> None:
        self._parts = parts
        self._config = parts.config.evaluate
        self._episodes = episodes
        self._deliveries = deliveries
        self._synchronous = parts.window.depth == 0
        self._running: asyncio.Task[None] | None = None

    async def proved(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate this version in `tasks` if that is due. The engines hold the version, and it is not the last."""
        due = self._config.every and self._parts.window.count(version) % self._config.every == 0
        if due and self._parts.task.heldout:
            if self._running is not None and not self._running.done():
                why = "the evaluation before it is still running"
                self._parts.recorder.evaluation_skipped(version, "during", why)
            else:
                # The engines are held before anything else can happen, so none of them has a newer version.
                self._hold("during", version)
                self._running = tasks.create_task(self.evaluate("during", version), name="evaluate")
        if self._synchronous and self._running is not None:
            # Held-out requests must not mix with requests of the next version: they would change its schedule.
            await self._running

    async def evaluate(self, moment: Moment, version: int) -> None:
        """Answer the held-out prompts and record the result, or record why there is none."""
        recorder, prompts = self._parts.recorder, self._parts.task.heldout
        if not prompts or version == NO_VERSION:
            return
        if moment == "during":
            prompts = prompts[: self._config.during or None]
        else:
            recorder.shown.phase = "evaluating"
        beside_training = moment == "during" and not self._synchronous
        limit = asyncio.timeout(self._config.deadline if beside_training else None)
        try:
            async with limit:
                while not await self._evaluated(moment, version, prompts):
                    newest = await self._newest(moment)
                    if newest not in (version, NO_VERSION):
                        why = f"no engine holds it any more; version {newest} is evaluated in its place"
                        recorder.evaluation_skipped(version, moment, why)
                        version = newest
        except TimeoutError:
            if not limit.expired():
                raise
            why = f"it took longer than [evaluate] deadline = {self._config.deadline:g} s"
            recorder.evaluation_skipped(version, moment, why)
        finally:
            self._parts.pool.free()
            self._parts.waits.moved()

    def _hold(self, moment: Moment, version: int | None) -> int:
        engines = len(self._parts.pool.engines)
        beside_training = moment == "during" and not self._synchronous
        return self._deliveries.hold(version, math.ceil(engines / EVALUATION_SHARE) if beside_training else engines)

    async def _newest(self, moment: Moment) -> int:
        """Hold engines at the newest version that one of them holds, as soon as there is one. Return the version."""
        found = NO_VERSION

        def held() -> bool:
            nonlocal found
            found = self._hold(moment, None)
            return found != NO_VERSION or self._parts.stopping.is_set()

        await self._parts.waits.until("evaluate", lambda: "an engine that has proved a version", held)
        return found

    async def _evaluated(self, moment: Moment, version: int, prompts: Sequence[Prompt]) -> bool:
        """Evaluate this version. Return False if no engine holds the version any more."""
        recorder, waits, stopping = self._parts.recorder, self._parts.waits, self._parts.stopping
        if stopping.is_set():
            recorder.evaluation_skipped(version, moment, STOPPED)
            return True
        slots = self._parts.config.engine.slots * len(self._parts.pool.engines)
        if moment == "during" and not self._synchronous:
            slots = max(1, slots // EVALUATION_SHARE)

        def lost() -> bool:
            return not self._parts.pool.holding and self._hold(moment, version) == NO_VERSION

        if lost():
            return False
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
                lambda: evaluation.done() or stopping.is_set() or lost(),
            )
            if evaluation.done():
                recorder.evaluated(*evaluation.result())
            elif stopping.is_set():
                recorder.evaluation_skipped(version, moment, STOPPED)
            return evaluation.done() or stopping.is_set()
        finally:
            evaluation.cancel()
            # Its requests must have ended before another evaluation sends requests with the same ids.
            await asyncio.wait([evaluation])


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

    traces = [trace.versions for rollout in rollouts.values() for trace in rollout.traces]
    versions = Counter(np.concatenate(traces).tolist())
    del versions[NO_VERSION]
    answered = [[rollouts[p, sample] for sample in range(samples)] for p in range(len(prompts))]
    of_tasks = {
        name: {"prompts": len(own), **_figures(own)}
        for name in sorted({prompt.task for prompt in prompts} - {""})
        if (own := [each for prompt, each in zip(prompts, answered, strict=True) if prompt.task == name])
    }
    evaluation = EvaluationRecord(
        version=version,
        moment=moment,
        prompts=len(prompts),
        samples=samples,
        **_figures(answered),
        started=started,
        ended=now(),
        versions=msgspec.json.encode(dict(sorted(versions.items()))).decode(),
        tasks=msgspec.json.encode(of_tasks).decode(),
    )
    failed = sum(rollout.ending == "failed" for rollout in rollouts.values())
    return evaluation, [answers[p] for p in sorted(answers)], failed


def _figures(answered: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Return the figures of the answers to each prompt. An answer is right if its reward is at least 1."""
    right = [sum(_reward(rollout) >= 1.0 for rollout in answers) for answers in answered]
    rollouts = [rollout for answers in answered for rollout in answers]
    return {
        "pass_1": sum(right) / len(rollouts),
        "pass_k": sum(count > 0 for count in right) / len(answered),
        "reward_mean": math.fsum(_reward(rollout) for rollout in rollouts) / len(rollouts),
        "tokens_mean": sum(rollout.trained_tokens for rollout in rollouts) / len(rollouts),
    }


def _reward(rollout: Rollout) -> float:
    return 0.0 if rollout.ending == "failed" or rollout.reward is None else rollout.reward

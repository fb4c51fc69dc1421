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

from headrace.config.evaluate import MeasuredSection
from headrace.engines.base import Sampling
from headrace.gateway.base import GATEWAY_DIED
from headrace.observe.records import EvaluationRecord, SampleRecord
from headrace.pipeline.figures import Answer, chosen_figures, figures
from headrace.pipeline.parts import Parts
from headrace.pipeline.versions import Deliveries
from headrace.rollouts.base import AnyEpisode, EpisodePlan, derive_seed
from headrace.rollouts.groups import run_episode
from headrace.rollouts.turns import Episode
from headrace.scoring.base import Stage
from headrace.types import NO_VERSION, Group, Prompt, Trace

Moment = Literal["before", "during", "after"]
HELDOUT_PRIORITY = -1
"""Held-out requests come before training requests: their engines take no new version until they have ended."""
EVALUATION_SHARE = 4
"""An evaluation during training holds at least one engine, and one in `EVALUATION_SHARE`. It uses at most one in
`EVALUATION_SHARE` slots of all engines."""
STOPPED = "the run was stopped"
ONCE = MeasuredSection()
"""One answer to every prompt."""
SHOWN = 8
"""The number of held-out answers kept for people to read."""


class Episodes:
    """The maker of episodes, as the configuration describes them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._config = parts.config
        self._stop_tokens = tuple(parts.chat.token_id(token) for token in parts.config.rollouts.stop)
        self._step_tokens = parts.scoring.step_token_ids

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

    def heldout(self, prompt: Prompt, sample: int, version: int, of_set: str = "") -> AnyEpisode:
        """Make the episode for one answer to a held-out prompt: one of the task's own, or one of a set."""
        name = f"heldout-{version}/{prompt.id}" if not of_set else f"heldout-{version}/{of_set}/{prompt.id}"
        return self._make(
            EpisodePlan(
                id=f"{name}/{sample}",
                index=sample,
                prompt=prompt,
                sampling=self._heldout_sampling(name, sample, of_set),
                group=name,
                priority=HELDOUT_PRIORITY,
                version=version,
                max_turns=self._config.rollouts.max_turns,
                max_length=self._parts.max_length,
            )
        )

    def _heldout_sampling(self, name: str, sample: int, of_set: str) -> Sampling:
        if not of_set:
            return self._sampling(name, sample, self._config.evaluate.temperature)
        own = self._config.evaluate.sets[of_set]
        return msgspec.structs.replace(
            self._sampling(name, sample, own.temperature),
            max_tokens=own.max_tokens or self._config.rollouts.max_tokens,
            top_k=own.top_k,
            top_p=own.top_p,
            min_p=own.min_p,
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
            step_token_ids=self._step_tokens,
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
        if due and (self._parts.task.heldout or self._parts.sets):
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
        recorder, sets = self._parts.recorder, {"": self._parts.task.heldout, **self._parts.sets}
        sets = {name: prompts for name, prompts in sets.items() if prompts}
        if not sets or version == NO_VERSION:
            return
        if moment == "during":
            sets = {name: prompts[: self._config.during or None] for name, prompts in sets.items()}
        else:
            recorder.shown.phase = "evaluating"
        beside_training = moment == "during" and not self._synchronous
        limit = asyncio.timeout(self._config.deadline if beside_training else None)
        try:
            async with limit:
                while not await self._evaluated(moment, version, sets):
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

    async def _evaluated(self, moment: Moment, version: int, sets: Mapping[str, Sequence[Prompt]]) -> bool:
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
        evaluation = asyncio.create_task(self._evaluate_sets(moment, version, sets, slots))
        evaluation.add_done_callback(lambda _: waits.moved())
        try:
            await waits.until(
                "evaluate",
                lambda: f"{sum(map(len, sets.values()))} held-out prompts",
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

    async def _evaluate_sets(
        self, moment: Moment, version: int, sets: Mapping[str, Sequence[Prompt]], slots: int
    ) -> tuple[EvaluationRecord, list[SampleRecord], int]:
        """Evaluate one set after the other. The first one gives the figures of the evaluation itself."""
        results = {
            name: await evaluate(
                prompts,
                lambda prompt, sample, name=name: self._episodes.heldout(prompt, sample, version, name),  # type: ignore[misc]
                self._parts.scoring,
                version=version,
                moment=moment,
                now=self._parts.recorder.now,
                measured=self._config.sets[name] if name else self._config,
                concurrency=slots,
            )
            for name, prompts in sets.items()
        }
        record, answers, _ = next(iter(results.values()))
        of_sets = {name: set_figures(found) for name, (found, _, _) in results.items() if name}
        record = msgspec.structs.replace(
            record,
            ended=self._parts.recorder.now(),
            sets=msgspec.json.encode(of_sets).decode(),
        )
        return record, answers, sum(failed for _, _, failed in results.values())


async def evaluate(
    prompts: Sequence[Prompt],
    make_episode: Callable[[Prompt, int], AnyEpisode],
    scoring: Stage,
    *,
    version: int,
    moment: Moment,
    now: Callable[[], float],
    measured: MeasuredSection = ONCE,
    concurrency: int = 64,
) -> tuple[EvaluationRecord, list[SampleRecord], int]:
    """Answer every prompt, as often as `measured` says, with `concurrency` episodes at a time. There must be a prompt.

    Return the figures, the first answers to read, and the number of failed rollouts, which count as wrong answers. The
    results are ordered by prompt and sample, never by arrival. No rollout enters the buffer.
    """
    started, samples = now(), measured.samples
    given: dict[tuple[int, int], Answer] = {}
    answers: dict[int, SampleRecord] = {}
    waiting = deque((p, prompt, sample) for p, prompt in enumerate(prompts) for sample in range(samples))

    async def work() -> None:
        while waiting:
            p, prompt, sample = waiting.popleft()
            episode = make_episode(prompt, sample)
            try:
                await episode.prepare()
                rollout = await run_episode(episode, scoring, heldout=True)
            finally:
                await episode.discard()
            if rollout.reason.startswith(GATEWAY_DIED):
                waiting.appendleft((p, prompt, sample))  # Nothing was wrong with the answer, so it is asked for again.
                continue
            answer = given[p, sample] = Answer(rollout, episode.answer)
            if p < SHOWN and sample == 0:
                question = prompt.text if prompt.text is not None else (prompt.messages or [{}])[-1].get("content", "")
                answers[p] = SampleRecord(
                    version=version,
                    moment=moment,
                    prompt=prompt.id,
                    question=question,
                    answer=rollout.reason if rollout.ending == "failed" else episode.answer,
                    reward=answer.reward,
                )

    async with asyncio.TaskGroup() as tasks:
        for number in range(min(concurrency, len(prompts) * samples)):
            tasks.create_task(work(), name=f"evaluate {number}")

    traces = [trace.versions for answer in given.values() for trace in answer.rollout.traces]
    versions = Counter(np.concatenate(traces).tolist())
    del versions[NO_VERSION]
    answered = [[given[p, sample] for sample in range(samples)] for p in range(len(prompts))]
    of_tasks = {
        name: {"prompts": len(own), **figures(own), **chosen_figures(own, measured)}
        for name in sorted({prompt.task for prompt in prompts} - {""})
        if (own := [each for prompt, each in zip(prompts, answered, strict=True) if prompt.task == name])
    }
    evaluation = EvaluationRecord(
        version=version,
        moment=moment,
        prompts=len(prompts),
        samples=samples,
        **figures(answered),  # type: ignore[arg-type]
        started=started,
        ended=now(),
        versions=msgspec.json.encode(dict(sorted(versions.items()))).decode(),
        tasks=msgspec.json.encode(of_tasks).decode(),
        passes=msgspec.json.encode(chosen_figures(answered, measured)).decode(),
    )
    failed = sum(answer.rollout.ending == "failed" for answer in given.values())
    return evaluation, [answers[p] for p in sorted(answers)], failed


def set_figures(record: EvaluationRecord) -> dict[str, float]:
    """Return the figures of one set, by name."""
    own = ("prompts", "samples", "pass_1", "pass_k", "reward_mean", "tokens_mean")
    return {key: getattr(record, key) for key in own} | msgspec.json.decode(record.passes, type=dict[str, float])

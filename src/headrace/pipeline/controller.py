"""The controller: it closes the loop, and does nothing that takes time itself.

    source ─▶ ADMIT ─▶ groups ─▶ engines ─▶ judges ─▶ window ─▶ TRAIN ─▶ trainer
                 ▲                  ▲                              │
                 └── slots freed ── DELIVER ◀── published version ─┘

    loop      waits for                                   is woken by
    ADMIT     a free slot of the window                   DELIVER (a version is proved), a group that failed
    (group)   its episodes: tokens, judgements            engines and reward workers; one task a group
    TRAIN     a batch in the window, a free place at the  a group that completes, a step that ends
              trainer (it holds at most two batches)
    DELIVER   a published version; engines that prove it  the trainer's announcement; a loop an engine (`deliveries`)
    EVALUATE  (a task now and then) held-out answers      DELIVER, every `[evaluate] every` versions

Every wait is in the book of `waits`; when nothing moves for `[pipeline] stall_seconds`, the watch loop ends the run
with a line that says who waits for whom.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from headrace.algorithms.assemble import assemble
from headrace.errors import HeadraceError
from headrace.pipeline.deliveries import Deliveries
from headrace.pipeline.episodes import Episodes
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Moment
from headrace.pipeline.warm_start import warm_start
from headrace.rollouts.base import AnyEpisode
from headrace.rollouts.evaluation import evaluate
from headrace.rollouts.groups import cancel_group, prepare_group, run_group
from headrace.scoring.shuffle import shuffle_rewards
from headrace.training.messages import Published
from headrace.types import Group, Prompt

BATCHES_AT_TRAINER = 2
"""One in training and one at hand, so that the trainer never waits for a message."""
FAILED_IN_A_ROW = 20
EVALUATION_SHARE = 4
"""Evaluation beside training takes at most one in so many slots of the engines."""


class Controller:
    """Drives one run from its first version to its last."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.window = parts.window
        self.waits = parts.waits
        self.recorder = parts.recorder
        self.episodes = Episodes(parts)
        self.synchronous = parts.window.depth == 0
        self.deliveries = Deliveries(
            parts.pool,
            parts.trainer,
            parts.recorder,
            parts.waits,
            rolling=self.config.delivery.rolling,
            patience=self.config.delivery.patience,
            together=self.synchronous,
        )
        self.first_version = parts.window.first_version
        self.versions_done = parts.first_step // self.config.delivery.publish_every
        self.last_version = self.first_version + self.config.run.versions - self.versions_done
        self.total_batches = (self.last_version - self.first_version) * self.config.delivery.publish_every
        self.proved = -1
        self.stopping = False
        """Set by Ctrl-C: nothing new begins, what is in training is finished."""
        self._published: deque[Published] = deque()
        self._running: dict[int, list[AnyEpisode]] = {}
        self._at_trainer = 0
        self._failed_in_a_row = 0
        self._trained_batches = 0
        self._evaluating: asyncio.Task[None] | None = None

    # ---- the phases of a run

    async def begin(self) -> None:
        """Warm start (unless a checkpoint is ahead of it), publish the first version, evaluate it."""
        if not self.parts.resumed:
            await warm_start(self.parts, lambda: self.stopping)
        if self.stopping:
            return
        await self.parts.trainer.publish(self.first_version, self.parts.parent_version)
        await self._deliver_next()
        await self._evaluate("before")

    async def train(self) -> None:
        """Run the loops until the last version is proved, or until `stop` was called."""
        if self.stopping:
            return
        self.recorder.phase = "training"
        self.recorder.note(
            f"at most {self.window.capacity} groups under way; no token will be trained more than "
            f"{self.window.lag_bound} versions after it was sampled"
        )
        self.recorder.training_started()
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self.admit_loop(loops), name="admit")
            loops.create_task(self.train_loop(loops), name="train")
            loops.create_task(self.deliver_loop(loops), name="deliver")
        self.recorder.training_ended()

    async def finish(self) -> None:
        """Evaluate the last version and save it."""
        await self._evaluate("after")
        if self.proved >= 0:
            await self._save()

    def stop(self) -> None:
        """Begin no more groups; end the run in good order after what is in training."""
        self.stopping = True
        self.waits.ring()

    def published(self, announcement: Published) -> None:
        """The trainer has announced a version."""
        self._published.append(announcement)
        self.waits.moved()

    # ---- ADMIT

    async def admit_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Start groups while the window has slots for them."""
        while not self._admitted_all():
            await self.waits.until("admit", self._explain_admission, self._may_admit)
            started = [self._admit() for _ in range(0 if self.stopping else self.window.free)]
            if self.synchronous:
                # All first requests leave in one message: the engine's schedule follows from it alone.
                for _, episodes in started:
                    await prepare_group(episodes)
            for group, episodes in started:
                tasks.create_task(self._run_group(group, episodes), name=f"group {group.id}")
        if self.stopping:
            for episodes in list(self._running.values()):
                await cancel_group(episodes, "interrupted")

    def _may_admit(self) -> bool:
        return self.window.may_admit() or self._admitted_all()

    def _explain_admission(self) -> str:
        return f"a slot ({self.window.explain_admission()})"

    def _admitted_all(self) -> bool:
        return self.stopping or self._trained_batches >= self.total_batches

    def _admit(self) -> tuple[Group, list[AnyEpisode]]:
        group = Group(id=self.recorder.next_group_id(), prompt=self.parts.source.draw(), version=self.proved)
        self.window.admit(group.id, group.version)
        episodes = self.episodes.of_group(group)
        self.recorder.admitted(group, [episode.id for episode in episodes])
        self._running[group.id] = episodes
        return group, episodes

    async def _run_group(self, group: Group, episodes: list[AnyEpisode]) -> None:
        if not self.synchronous:
            await prepare_group(episodes)
        group = await run_group(group, episodes)
        del self._running[group.id]
        self.recorder.rollouts_ended(group)
        if self.stopping:
            self.window.drop(group.id)
            self.recorder.group_ended(group, "dropped", "interrupted")
        elif len(group.usable) < min(2, len(group.rollouts)):
            self._fail_group(group)
        else:
            self._failed_in_a_row = 0
            self.window.complete(group)
        self.waits.moved()

    def _fail_group(self, group: Group) -> None:
        reason = next(rollout.reason for rollout in group.rollouts if rollout.ending == "failed")
        self.window.fail(group.id)
        self.recorder.group_ended(group, "failed", reason)
        self._failed_in_a_row += 1
        # Groups that fail are replaced by others; where all fail, replacing them would go on for ever.
        if self._failed_in_a_row >= max(FAILED_IN_A_ROW, 2 * self.window.capacity):
            raise HeadraceError(f"the last {self._failed_in_a_row} groups all failed, the last one because: {reason}")

    # ---- TRAIN

    async def train_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Hand batches to the trainer, in order, as soon as both are there."""
        while self.window.batches < self.total_batches and not self.stopping:
            await self.waits.until("train", self._explain_training, self._may_train)
            version = self.window.trained_version
            groups = None if self.stopping else self.window.take()
            if groups is None:
                continue
            self._at_trainer += 1
            tasks.create_task(self._train_batch(groups, version, self.window.batches), name="step")
        if self.stopping:
            self._drop_ready_groups()

    def _may_train(self) -> bool:
        if self.stopping:
            return True
        for group in self.window.stale():
            self.window.drop(group.id)
            self.recorder.group_ended(group, "dropped", "stale")
        return self._at_trainer < BATCHES_AT_TRAINER and self.window.batch_ready()

    def _explain_training(self) -> str:
        if self._at_trainer >= BATCHES_AT_TRAINER:
            return f"{self.parts.trainer.name} to end a step"
        return f"a batch ({self.window.explain_batch()})"

    async def _train_batch(self, groups: list[Group], version: int, batches: int) -> None:
        config = self.config
        step = self.parts.first_step + batches
        if config.scoring.shuffle:
            groups = shuffle_rewards(groups, config.run.seed, step)
        batch = assemble(
            groups,
            step=step,
            version=version,
            advantage=config.algorithm.advantage,
            normalize=config.algorithm.normalize,
            group_size=config.rollouts.group_size,
            max_tokens=config.rollouts.max_tokens,
            temperature=config.rollouts.temperature,
            overlong_buffer=config.algorithm.overlong_buffer,
            overlong_penalty=config.algorithm.overlong_penalty,
            length_penalty=config.algorithm.length_penalty,
        )
        made = version + 1 if batches % config.delivery.publish_every == 0 else None
        save = made is not None and self._save_due(made)
        report = await self.parts.trainer.train(batch, publish=made, parent=version, save=save)
        self._at_trainer -= 1
        self._trained_batches += 1
        self.recorder.step_ended(batch, groups, report)
        self.waits.moved()

    def _drop_ready_groups(self) -> None:
        for group in self.window.ready_groups():
            self.window.drop(group.id)
            self.recorder.group_ended(group, "dropped", "interrupted")

    # ---- DELIVER

    async def deliver_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Bring every published version to the engines, and free the slots of what it was trained on."""
        while self.proved < self.last_version and not self._delivered_all():
            if not await self._deliver_next():
                return
            self._evaluate_if_due(tasks)
            if self.synchronous and self._evaluating is not None:
                # Held-out requests may not mix with those of the next version: they would change its schedule.
                await self._evaluating
            self.window.release(self.proved)
            self.waits.moved()

    def _delivered_all(self) -> bool:
        idle = self._at_trainer == 0 and not self._published
        return self.stopping and idle and self.proved >= self.window.trained_version

    async def _deliver_next(self) -> bool:
        await self.waits.until(
            "deliver",
            lambda: f"{self.parts.trainer.name} to publish version {self.proved + 1}",
            lambda: bool(self._published) or self._delivered_all(),
        )
        if not self._published:
            return False
        announcement = self._published.popleft()
        manifest = announcement.manifest
        self.recorder.version_published(manifest, announcement.snapshot_seconds)
        await self.deliveries.deliver(manifest)
        self.proved = manifest.version
        self.recorder.version_proved(self.proved)
        self.waits.moved()
        return True

    # ---- EVALUATE, SAVE

    def _evaluate_if_due(self, tasks: asyncio.TaskGroup) -> None:
        every = self.config.evaluate.every
        due = every and self.proved < self.last_version and (self.proved - self.first_version) % every == 0
        if due and not self.stopping and (self._evaluating is None or self._evaluating.done()):
            self._evaluating = tasks.create_task(self._evaluate("during"), name="evaluate")

    async def _evaluate(self, moment: Moment) -> None:
        config = self.config.evaluate
        prompts: Sequence[Prompt] = self.parts.task.heldout
        if not prompts or self.stopping:
            return
        if moment == "during":
            prompts = prompts[: config.during or None]
        else:
            self.recorder.phase = "evaluating"
        version = self.proved
        slots = self.config.engine.slots * self.config.engine.processes
        started = self.recorder.now()
        evaluation = asyncio.create_task(
            evaluate(
                prompts,
                lambda prompt, sample: self.episodes.heldout(prompt, sample, version),
                samples=config.samples,
                concurrency=max(1, slots // EVALUATION_SHARE) if moment == "during" and not self.synchronous else slots,
            )
        )
        evaluation.add_done_callback(lambda _: self.waits.moved())
        try:
            await self.waits.until(
                "evaluate", lambda: f"{len(prompts)} held-out prompts", lambda: evaluation.done() or self.stopping
            )
            if evaluation.done():
                self.recorder.evaluated(version, moment, evaluation.result(), started)
        finally:
            evaluation.cancel()

    def _save_due(self, version: int) -> bool:
        every = self.config.training.checkpoint_every
        return bool(every) and (version - self.first_version) % every == 0 and version < self.last_version

    async def _save(self) -> None:
        self.recorder.saved(self.proved, await self.parts.trainer.save(self.proved))
        self.waits.moved()

"""The controller runs the loops that connect generation, training and delivery. It does no slow work itself.

    source ─▶ ADMIT ─▶ groups ─▶ engines ─▶ scoring ─▶ window ─▶ TRAIN ─▶ trainer
                 ▲                  ▲                               │
                 └── slots freed ── DELIVER ◀── published version ──┘

    loop      waits for                                   is woken by
    SERVE     an event                                    workers, group tasks, supervision (see `events`)
    ADMIT     a free slot in the window                   DELIVER (a version is proved), a group that failed
    (group)   tokens and scores of its episodes           engines and scorers; there is one task per group
    TRAIN     a batch in the window, and room at the      a group that completes, a step that ends
              trainer, which holds at most two batches
    DELIVER   a published version; engines that prove it  `Published`, `VersionProved`; a loop per engine (`deliveries`)
    SAVE      0.2 seconds                                 the clock; new tokens are journalled (`partials`)
    EVALUATE  answers to held-out prompts                 DELIVER, every `[evaluate] every` versions (`evaluations`);
                                                          a task, not a loop

Every wait is registered in `waits`. If nothing makes progress for `[pipeline] stall_seconds`, the watch loop ends the
run with a line that says who waits for whom. `recovery` describes what happens when a process dies.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from headrace.channel.heartbeats import Heartbeat
from headrace.engines.messages import Deltas
from headrace.pipeline.attempts import INTERRUPTED, SURPLUS, Attempts
from headrace.pipeline.batches import make_batch
from headrace.pipeline.deliveries import Deliveries
from headrace.pipeline.engine_watch import EngineWatch
from headrace.pipeline.episodes import Episodes
from headrace.pipeline.evaluations import Evaluations
from headrace.pipeline.events import Died, Event, GroupScored, Heard, Returned, VersionProved
from headrace.pipeline.partials import Partials
from headrace.pipeline.parts import Parts
from headrace.pipeline.recovery import Recovery
from headrace.pipeline.steps import StepRequest, Steps
from headrace.pipeline.versions import Versions
from headrace.pipeline.warm_start import warm_start
from headrace.rollouts.base import AnyEpisode
from headrace.rollouts.groups import prepare_group, run_group
from headrace.training.base import Checkpoint
from headrace.training.remote import Published, Saved
from headrace.types import NO_VERSION, Group

BATCHES_AT_TRAINER = 2
"""One batch in training and one queued, so that the trainer never waits for a message."""


class Controller:
    """The controller of one run, which drives it from its first version to its last."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.window = parts.window
        self.waits = parts.waits
        self.recorder = parts.recorder
        self.events = parts.events
        self.versions = Versions()
        self.watch = EngineWatch()
        """The record of when each engine last sent something."""
        self.episodes = Episodes(parts)
        self.attempts = Attempts(parts.source, parts.window, parts.recorder, parts.config.buffer.filter)
        self.partials = Partials(self.attempts, parts.recorder)
        self.evaluations = Evaluations(parts, self.episodes)
        self.synchronous = parts.window.depth == 0
        self.deliveries = Deliveries(
            parts.pool,
            parts.trainer,
            self.versions,
            parts.events,
            parts.waits,
            parts.recorder,
            parts.processes,
            rolling=self.config.delivery.rolling,
            patience=self.config.delivery.patience,
            together=self.synchronous,
        )
        trained = parts.checkpoint.step if parts.checkpoint.found else -self.config.warm_start.steps
        self.steps = Steps(parts.trainer, parts.waits, trained)
        self.recovery = Recovery(parts, self.versions, self.steps, self.watch)
        self.first_version = parts.window.first_version
        self.versions_done = parts.first_step // self.config.delivery.publish_every
        self.total_batches = (self.config.run.versions - self.versions_done) * self.config.delivery.publish_every
        self._at_trainer = 0
        self._trained_batches = 0

    @property
    def proved(self) -> int:
        """The newest version that was declared proved. New groups begin under this version."""
        return self.versions.proved

    @property
    def stopping(self) -> bool:
        """Whether Ctrl-C was pressed: nothing new begins, and batches in training are finished."""
        return self.parts.stopping.is_set()

    @property
    def last_version(self) -> int:
        """The version that ends the run."""
        return self.window.version_of(self.total_batches)

    # ---- the phases of a run

    async def begin(self) -> None:
        """Make the warm start (if there is no checkpoint), then publish and evaluate the first version.

        A resumed run first trains again, from the journal, the steps that were trained after its checkpoint.
        """
        if not self.parts.checkpoint.found:
            await warm_start(self.parts, self.steps)
        await self.recovery.train_again()
        if self.stopping:
            return
        self.versions.asked = True
        await self.steps.publish(self.first_version, self.parts.checkpoint.version)
        while self.proved == NO_VERSION:
            await self._deliver_next()
        await self.evaluations.evaluate("before", self.proved)

    async def train(self) -> None:
        """Run the loops until the last version is proved, or until `stop` is called."""
        if self.stopping:
            return
        self.recorder.phase = "training"
        self.recorder.note(
            f"at most {self.window.capacity} groups under way; no token will be trained more than "
            f"{self.window.lag_bound} versions after it was sampled"
        )
        self.recorder.training_started()
        async with asyncio.TaskGroup() as loops:
            self.attempts.run_in(loops)
            saving = loops.create_task(self.partials.save_loop(), name="save")
            loops.create_task(self.admit_loop(loops), name="admit")
            loops.create_task(self.train_loop(loops), name="train")
            delivering = loops.create_task(self.deliver_loop(loops), name="deliver")
            delivering.add_done_callback(lambda _: saving.cancel())
        await self.waits.until("train", lambda: "the last groups to be recorded", lambda: not self.attempts.running)
        self.recorder.training_ended()

    async def finish(self) -> None:
        """Evaluate the last version and save it."""
        await self.evaluations.evaluate("after", self.proved)
        if self.proved >= 0:
            self.recorder.saved(self.proved, await self.steps.save(self.proved))
            self.waits.moved()

    def stop(self) -> None:
        """Stop admitting groups, and end the run in order after the batches in training."""
        self.parts.stopping.set()
        self.attempts.close(INTERRUPTED)
        self.waits.ring()

    # ---- SERVE

    async def serve(self) -> None:
        """Handle events in their order and deliver versions to engines, until cancelled.

        All other loops depend on this loop.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.deliveries.run(), name="deliver to engines")
            while True:
                for event in await self.events.take():
                    self._handle(event, tasks)

    def _handle(self, event: Event, tasks: asyncio.TaskGroup) -> None:
        match event:
            case Heard(engine, Deltas() as tokens):
                self.parts.remote[engine].deliver(tokens.deltas)
                self.watch.progress(engine)
                self.waits.moved()
            case Heard(process, Heartbeat() as beat):
                self.recorder.beat(process, beat)
            case Heard(_, Published(manifest=manifest, snapshot_seconds=seconds)):
                self.versions.published(manifest)
                self.recorder.version_published(manifest, seconds)
                self.waits.moved()
            case Heard(_, Saved(version=version, path=path)):
                self.recorder.saved(version, Path(path))
            case GroupScored(group, episodes):
                self.partials.ended(episodes)
                self.attempts.ended(group)
                self.waits.moved()
            case VersionProved(proof):
                self.recorder.delivered(proof)
                self.deliveries.proved(proof)
            case Died(death, restarts):
                if death.peer == self.parts.trainer.name:
                    self.recovery.trainer_died()
                elif any(engine.name == death.peer for engine in self.parts.pool.engines):
                    self.recovery.engine_died(death)
                self.recorder.note(f"{death}; it is started again" if restarts else str(death))
            case Returned(process, facts):
                self.recorder.note(f"{process} is back")
                if process == self.parts.trainer.name:
                    returning = self.recovery.trainer_returned(Checkpoint.of(facts))
                    tasks.create_task(returning, name=f"bring back {process}")
                else:
                    self.recovery.engine_returned(process)

    # ---- ADMIT

    async def admit_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Continue the groups of a previous process, then start new groups while the window has free slots."""
        await self._start(self.recovery.resume_groups(self.attempts, self.episodes, self.partials), tasks)
        while not self._admitted_all():
            await self.waits.until("admit", self._explain_admission, self._may_admit)
            await self._start([self._admit() for _ in range(0 if self.stopping else self.window.free)], tasks)
        if self.stopping:
            await self.attempts.cancel_running()

    async def _start(self, groups: list[tuple[Group, list[AnyEpisode]]], tasks: asyncio.TaskGroup) -> None:
        if self.synchronous:
            # All first requests leave in one message, so that the engine's schedule depends on that message alone.
            for _, episodes in groups:
                await prepare_group(episodes)
        for group, episodes in groups:
            tasks.create_task(self._run_group(group, episodes), name=f"group {group.id}")

    def _may_admit(self) -> bool:
        return self.window.may_admit() or self._admitted_all()

    def _explain_admission(self) -> str:
        return f"a slot ({self.window.explain_admission()})"

    def _admitted_all(self) -> bool:
        return self.stopping or self._trained_batches >= self.total_batches

    def _admit(self) -> tuple[Group, list[AnyEpisode]]:
        group_id = self.recorder.next_group_id()
        attempt = self.attempts.next(group_id)
        group = Group(id=group_id, prompt=attempt.prompt, version=self.proved, policy=self.window.policy)
        self.window.admit(group.id, group.version)
        episodes = self.episodes.of_group(group, attempt.prefixes)
        self.recorder.admitted(group, [episode.id for episode in episodes], drawn=self.parts.source.position)
        self.attempts.started(group, episodes)
        return group, episodes

    async def _run_group(self, group: Group, episodes: list[AnyEpisode]) -> None:
        if not self.synchronous:
            await prepare_group(episodes)
        rollouts = self.config.rollouts
        group = await run_group(
            group,
            episodes,
            self.parts.scoring,
            min_group=rollouts.min_group,
            straggler_seconds=rollouts.straggler_seconds,
        )
        self.events.put(GroupScored(group, episodes))

    # ---- TRAIN

    async def train_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Send batches to the trainer, in order, as soon as a batch is ready and the trainer has room."""
        while self.window.batches < self.total_batches and not self.stopping:
            await self.waits.until("train", self._explain_training, self._may_train)
            groups = None if self.stopping else self.window.take()
            if groups is None:
                continue
            self._at_trainer += 1
            tasks.create_task(self._train_batch(groups, self.window.batches), name="step")
        # With oversampling, some groups may be left that no batch needs.
        self.attempts.close(SURPLUS)
        self.attempts.drop_ready()
        await self.attempts.cancel_running()

    def _may_train(self) -> bool:
        if self.stopping:
            return True
        self.attempts.sweep()
        return self._at_trainer < BATCHES_AT_TRAINER and self.window.batch_ready()

    def _explain_training(self) -> str:
        if self._at_trainer >= BATCHES_AT_TRAINER:
            return f"{self.parts.trainer.name} to end a step"
        return f"a batch ({self.window.explain_batch()})"

    async def _train_batch(self, groups: list[Group], batches: int) -> None:
        done = await self.steps.train(self.parts.first_step + batches, partial(self._order, groups, batches))
        assert done is not None
        batch, report = done
        self._at_trainer -= 1
        self._trained_batches += 1
        self.recorder.step_ended(batch, groups, report)
        self.waits.moved()

    def _order(self, groups: list[Group], batches: int) -> StepRequest:
        """Make the request for a step. This happens when the step's turn comes: version ids are known only then."""
        step, version = self.parts.first_step + batches, self.window.version_of(batches - 1)
        batch = make_batch(self.config, groups, step=step, version=version, republished=tuple(self.window.republished))
        made = version + 1 if batches % self.config.delivery.publish_every == 0 else None
        return StepRequest(batch, publish=made, parent=version, save=made is not None and self._save_due(made))

    # ---- DELIVER

    async def deliver_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Deliver every published version to the engines, then free the slots of the groups that it was trained on."""
        while self.proved < self.last_version and not self._delivered_all():
            if not await self._deliver_next():
                return
            if self.proved < self.last_version:
                await self.evaluations.proved(self.proved, tasks)
            self.window.release(self.proved)
            self.waits.moved()

    def _delivered_all(self) -> bool:
        idle = self._at_trainer == 0 and not self.versions.waiting
        return self.stopping and idle and self.proved >= self.window.trained_version

    async def _deliver_next(self) -> bool:
        await self.waits.until(
            "deliver",
            lambda: f"{self.parts.trainer.name} to publish version {self.proved + 1}",
            lambda: self.versions.waiting or self._delivered_all(),
        )
        if not self.versions.waiting:
            return False
        if await self.deliveries.deliver(self.versions.next()):
            self.recorder.version_proved(self.proved)
            self.waits.moved()
        return True

    # ---- checkpoints

    def _save_due(self, version: int) -> bool:
        every = self.config.training.checkpoint_every
        return bool(every) and (self.versions_done + self._count(version)) % every == 0 and version < self.last_version

    def _count(self, version: int) -> int:
        return version - self.window.version_of(0)

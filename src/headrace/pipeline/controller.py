"""The controller runs the loops that connect generation, training and delivery. It does no slow work itself.

    source ─▶ ADMIT ─▶ groups ─▶ engines ─▶ scoring ─▶ window ─▶ TRAIN ─▶ trainer
                 ▲                  ▲                               │
                 └── slots freed ── DELIVER ◀── published version ──┘

    loop      waits for                                   is woken by
    SERVE     an event                                    workers, group tasks, supervision (see `_handle`)
    ADMIT     a free slot in the window                   DELIVER (a version is proved), a group that failed
    (group)   tokens and scores of its episodes           engines and scorers; there is one task per group
    TRAIN     a batch in the window, and room at the      a group that completes, a step that ends
              trainer, which holds at most two batches
    DELIVER   a published version; engines that prove it  `Published`, `VersionProved`; a loop per engine (`Deliveries`)
    SAVE      0.2 seconds                                 the clock; new tokens are journalled (`attempts`)
    SCALE     0.1 seconds                                 the clock; engines join and leave (`scaling`)
    EVALUATE  answers to held-out prompts                 DELIVER, every `[evaluate] every` versions (`episodes`);
                                                          a task, not a loop

Every wait is registered in `waits`. If nothing makes progress for `[pipeline] stall_seconds`, the watch loop ends the
run with a line that says who waits for whom. `recovery` describes what happens when a process dies.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.channel.events import Awaited, Died, Dropped, Event, Heard, Returned
from headrace.channel.heartbeats import Heartbeat
from headrace.engines.serving import Deltas
from headrace.errors import PeerDied
from headrace.pipeline.attempts import INTERRUPTED, SURPLUS, Attempts
from headrace.pipeline.batches import make_batch, warm_start_batches
from headrace.pipeline.elastic import Idle
from headrace.pipeline.episodes import Episodes, Evaluations
from headrace.pipeline.parts import Parts
from headrace.pipeline.recovery import Recovery
from headrace.pipeline.scaling import Scaling
from headrace.pipeline.steps import Steps
from headrace.pipeline.teacher_versions import TeacherVersions
from headrace.pipeline.versions import Deliveries, VersionProved, Versions
from headrace.pipeline.waits import EngineWatch, Status, scorer_waits
from headrace.rollouts.base import AnyEpisode
from headrace.rollouts.groups import prepare_group, run_group
from headrace.training.base import Checkpoint
from headrace.training.remote import Published, Saved, TeacherPublished, Train
from headrace.types import NO_VERSION, Group

BATCHES_AT_TRAINER = 2
"""One batch in training and one queued, so that the trainer never waits for a message."""
SAVE_SECONDS = 0.2


@dataclass(frozen=True)
class GroupScored(Event):
    """All rollouts of a group have ended, and those that can be scored are scored."""

    group: Group


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
        self.synchronous = parts.window.depth == 0
        self.deliveries = Deliveries(parts, self.versions)
        self.teachers = TeacherVersions(parts)
        self.evaluations = Evaluations(parts, self.episodes, self.deliveries)
        trained = parts.checkpoint.step if parts.checkpoint.found else -self.config.warm_start.steps
        self.steps = Steps(parts.trainer, parts.waits, parts.stopping, trained)
        self.recovery = Recovery(parts, self.versions, self.steps, self.watch)
        self.scaling = Scaling(parts, self.versions, self.deliveries, self.watch, self._idle)
        self.total_batches = (self.config.run.versions - parts.versions_done) * self.config.delivery.publish_every
        self._at_trainer = 0
        self._trained_batches = 0

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
            await self._warm_start()
        await self.recovery.train_again()
        if self.stopping:
            return
        self.versions.asked = True
        await self.steps.publish(self.window.first_version, self.parts.checkpoint.version)
        while self.versions.proved == NO_VERSION:
            await self._deliver_next()
        await self.evaluations.evaluate("before", self.versions.proved)

    async def _warm_start(self) -> None:
        """Train on the task's demonstrations. The last of these steps has number 0; the journal marks all of them."""
        if self.config.warm_start.steps:
            self.recorder.shown.phase = "warm start"
        for batch in warm_start_batches(self.config, self.parts.task, self.parts.chat, self.window.first_version):
            report = await self.steps.train_known(batch)
            if report is None:
                return
            self.recorder.step_ended(batch, [], report)

    async def train(self) -> None:
        """Run the loops until the last version is proved, or until `stop` is called."""
        if self.stopping:
            return
        self.recorder.shown.phase = "training"
        self.recorder.note(
            f"at most {self.window.capacity} groups under way; no token will be trained more than "
            f"{self.window.lag_bound} versions after it was sampled"
        )
        self.recorder.journal.meta("train_started", self.recorder.now())
        self.recorder.journal.meta("train_ended", None)
        async with asyncio.TaskGroup() as loops:
            self.attempts.run_in(loops)
            saving = loops.create_task(self.save_loop(), name="save")
            loops.create_task(self.admit_loop(loops), name="admit")
            loops.create_task(self.train_loop(loops), name="train")
            delivering = loops.create_task(self.deliver_loop(loops), name="deliver")
            delivering.add_done_callback(lambda _: saving.cancel())
        await self.waits.until("train", lambda: "the last groups to be recorded", lambda: not self.attempts.running)
        self.recorder.journal.meta("train_ended", self.recorder.now())

    async def finish(self) -> None:
        """Evaluate the last version and save it."""
        await self.evaluations.evaluate("after", self.versions.proved)
        if self.versions.proved >= 0:
            self.recorder.saved(self.versions.proved, await self.steps.save(self.versions.proved))
            self.waits.moved()

    def stop(self) -> None:
        """Stop admitting groups, and end the run in order after the batches in training."""
        self.parts.stopping.set()
        self.attempts.close(INTERRUPTED)
        self.waits.ring()

    def status(self, processes: Mapping[str, str]) -> Status:
        """Return who waits for whom. `processes` maps a worker process to the phase that it reports."""
        waits = self.waits.entries() + self.watch.waits(self.parts.pool.running)
        waits += scorer_waits(self.parts.scoring.questions.silent())
        return Status(
            time=time.time(),
            pid=os.getpid(),
            phase=self.recorder.shown.phase,
            still=self.waits.still,
            limit=self.config.pipeline.stall_seconds,
            waits=sorted(waits, key=lambda wait: -wait.seconds),
            processes=dict(processes),
        )

    async def _keep_checkpoint(self, version: int, path: Path) -> None:
        # A trainer that dies meanwhile comes back with an older checkpoint, and saves a new one later.
        with contextlib.suppress(PeerDied):
            self.recorder.saved(version, await self.parts.trainer.fetch(path))

    # ---- SERVE

    async def serve(self) -> None:
        """Handle events in their order and deliver versions, until cancelled. All other loops depend on this one."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.deliveries.run(), name="deliver to engines")
            tasks.create_task(self.scaling.run(), name="scale the engines")
            while True:
                for event in await self.events.take():
                    self._handle(event, tasks)

    def _handle(self, event: Event, tasks: asyncio.TaskGroup) -> None:
        """Handle one event. `recovery` describes what follows the death and the return of a process."""
        gateway, scorers = self.parts.gateway, self.parts.scoring.processes
        match event:
            case Heard(process, message) if process in scorers and not isinstance(message, Heartbeat):
                scorers[process].hear(message)
                self.waits.moved()
            case Heard(engine, Deltas() as tokens):
                if engine in self.parts.remote:  # It may have left meanwhile.
                    self.parts.remote[engine].deliver(tokens.deltas)
                self.watch.progress(engine)
                self.waits.moved()
            case Heard(process, Heartbeat() as beat):
                self.recorder.beat(process, beat)
            case Heard(process, message) if gateway is not None and process == gateway.name:
                gateway.hear(message)
            case Heard(_, Published(manifest=manifest, snapshot_seconds=seconds, teachers=teachers)):
                self.versions.published(manifest)
                self.teachers.announced(manifest.version, teachers)
                self.recorder.version_published(manifest, seconds)
                self.waits.moved()
            case Heard(_, TeacherPublished(teacher=teacher, manifest=manifest)):
                self.teachers.published(teacher, manifest, tasks)
            case Heard(_, Saved(version=version, path=path)):
                tasks.create_task(self._keep_checkpoint(version, Path(path)), name="keep a checkpoint")
            case GroupScored(group):
                self.attempts.ended(group)
                self.waits.moved()
            case VersionProved(proof):
                self.recorder.delivered(proof)
                self.deliveries.proved(proof)
            case Dropped(peer, reason):
                self.recorder.note(f"a message of {peer} cannot be read and was dropped: {reason}")
            case Awaited(peer, reason):
                self.recorder.note(f"{peer} waits for its host: {reason}")
            case Died(death, restarts):
                if death.peer == self.parts.trainer.name:
                    self.recovery.trainer_died()
                elif gateway is not None and death.peer == gateway.name:
                    self.recovery.gateway_died(gateway, death)
                elif death.peer in scorers:
                    self.recovery.scorer_died(scorers[death.peer], death)
                elif any(engine.name == death.peer for engine in self.parts.pool.engines):
                    self.recovery.engine_died(death)
                self.recorder.note(f"{death}; it is started again" if restarts else str(death))
            case Returned(process, facts):
                self.recorder.note(f"{process} is back")
                if process == self.parts.trainer.name:
                    checkpoint = Checkpoint.of(facts)
                    for line in checkpoint.notes:
                        self.recorder.note(line)
                    returning = self.recovery.trainer_returned(checkpoint)
                    tasks.create_task(returning, name=f"bring back {process}")
                elif gateway is not None and process == gateway.name:
                    tasks.create_task(self.recovery.gateway_returned(gateway), name=f"bring back {process}")
                elif process in scorers:
                    self.recovery.scorer_returned(scorers[process])
                    self.teachers.returned(process, tasks)
                else:
                    self.recovery.engine_returned(process)

    # ---- ADMIT

    async def admit_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Continue the groups of a previous process, then start new groups while the window has free slots."""
        await self._start(self.recovery.resume_groups(self.attempts, self.episodes), tasks)
        while not self._admitted_all():
            await self.waits.until(
                "admit",
                lambda: f"a slot ({self.window.explain_admission()})",
                lambda: self.window.may_admit() or self._admitted_all(),
            )
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

    def _admitted_all(self) -> bool:
        return self.stopping or self._trained_batches >= self.total_batches

    def _admit(self) -> tuple[Group, list[AnyEpisode]]:
        group_id = next(self.recorder.group_ids)
        attempt = self.attempts.next(group_id)
        group = Group(id=group_id, prompt=attempt.prompt, version=self.versions.proved, policy=self.window.policy)
        self.window.admit(group.id, group.version)
        episodes = self.episodes.of_group(group, range(self.config.rollouts.group_size), prefixes=attempt.prefixes)
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
        self.events.put(GroupScored(group))

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

    def _order(self, groups: list[Group], batches: int) -> Train:
        """Make the request for a step. This happens when the step's turn comes: version ids are known only then.

        Tokens that an older release recorded have no temperature of their own (`unrecorded`): that of their run counts.
        """
        step, version = self.parts.first_step + batches, self.window.version_of(batches - 1)
        again, unrecorded = tuple(self.window.republished), self.parts.before.temperature
        batch = make_batch(self.config, groups, step=step, version=version, republished=again, unrecorded=unrecorded)
        if batches % self.config.delivery.publish_every:
            return Train(batch=batch, parent=version)
        made, every = version + 1, self.config.training.checkpoint_every
        count = self.parts.versions_done + made - self.window.version_of(0)
        save = bool(every) and count % every == 0 and made < self.last_version
        return Train(batch=batch, publish=made, parent=version, save=save)

    # ---- DELIVER

    async def deliver_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Deliver every published version to the engines, then free the slots of the groups that it was trained on."""
        while self.versions.proved < self.last_version and not self._delivered_all():
            if not await self._deliver_next():
                return
            if self.versions.proved < self.last_version:
                await self.evaluations.proved(self.versions.proved, tasks)
            self.window.release(self.versions.proved)
            self.waits.moved()

    def _delivered_all(self) -> bool:
        idle = self._at_trainer == 0 and not self.versions.waiting
        return self.stopping and idle and self.versions.proved >= self.window.trained_version

    async def _deliver_next(self) -> bool:
        await self.waits.until(
            "deliver",
            lambda: f"{self.parts.trainer.name} to publish version {self.versions.proved + 1}",
            lambda: self.versions.waiting or self._delivered_all(),
        )
        if not self.versions.waiting:
            return False
        if await self.deliveries.deliver(self.versions.next()):
            if self.synchronous:
                await self.waits.until(
                    "deliver",
                    lambda: f"the teachers {', '.join(self.teachers.unanswered)} to answer a version",
                    lambda: self.stopping or not self.teachers.unanswered,
                )
            self.recorder.version_served(self.parts.versions_done + self.window.count(self.versions.proved))
            self.waits.moved()
        return True

    # ---- SCALE

    def _idle(self) -> Idle | None:
        """Return who has nothing to do at this moment; None if the moment is not typical of the run."""
        engines = self.parts.pool.running
        away = self.steps.is_away or any(self.parts.pool.proved(e.name) < 0 for e in self.parts.pool.engines)
        if away or self.stopping or self.recorder.shown.phase != "training":
            return None
        without = sum(not requests for requests in engines.values()) / len(engines)
        return Idle(trainer=float(not self._at_trainer), engines=0.0 if self.window.may_admit() else without)

    # ---- SAVE

    async def save_loop(self) -> None:
        """Journal the new tokens of all running rollouts, again and again, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            self.attempts.save()

"""The controller: it closes the loop, and does nothing that takes time itself.

    source ─▶ ADMIT ─▶ groups ─▶ engines ─▶ scoring ─▶ window ─▶ TRAIN ─▶ trainer
                 ▲                  ▲                              │
                 └── slots freed ── DELIVER ◀── published version ─┘

    loop      waits for                                   is woken by
    ADMIT     a free slot of the window                   DELIVER (a version is proved), a group that failed
    (group)   its episodes: tokens, scores                engines and scorers; one task a group
    TRAIN     a batch in the window, a free place at the  a group that completes, a step that ends
              trainer (it holds at most two batches)
    DELIVER   a published version; engines that prove it  the trainer's announcement; a loop an engine (`deliveries`)
    SAVE      a fifth of a second                         time: new tokens are journalled (`partials`)
    EVALUATE  (a task now and then) held-out answers      DELIVER, every `[evaluate] every` versions (`evaluations`)

Every wait is in the book of `waits`; when nothing moves for `[pipeline] stall_seconds`, the watch loop ends the run
with a line that says who waits for whom.
"""

from __future__ import annotations

import asyncio
from collections import deque

from headrace.buffer.recovery import LeftGroup
from headrace.errors import PeerDied
from headrace.pipeline.attempts import INTERRUPTED, SURPLUS, Attempts
from headrace.pipeline.batches import make_batch
from headrace.pipeline.comeback import Comeback
from headrace.pipeline.deliveries import Deliveries
from headrace.pipeline.episodes import Episodes
from headrace.pipeline.evaluations import Evaluations
from headrace.pipeline.partials import Partials
from headrace.pipeline.parts import Parts
from headrace.pipeline.taking_up import train_again
from headrace.pipeline.warm_start import warm_start
from headrace.rollouts.base import AnyEpisode
from headrace.rollouts.groups import prepare_group, run_group
from headrace.training.messages import Published
from headrace.types import NO_VERSION, Group

BATCHES_AT_TRAINER = 2
"""One in training and one at hand, so that the trainer never waits for a message."""


class Controller:
    """Drives one run from its first version to its last."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.config = parts.config
        self.window = parts.window
        self.waits = parts.waits
        self.recorder = parts.recorder
        self.episodes = Episodes(parts)
        self.attempts = Attempts(parts.source, parts.window, parts.recorder, parts.config.buffer.filter)
        self.partials = Partials(self.attempts, parts.recorder)
        self.evaluations = Evaluations(parts, self.episodes, lambda: self.stopping)
        self.synchronous = parts.window.depth == 0
        self.deliveries = Deliveries(
            parts.pool,
            parts.trainer,
            parts.recorder,
            parts.waits,
            rolling=self.config.delivery.rolling,
            patience=self.config.delivery.patience,
            together=self.synchronous,
            end=parts.end_engine,
        )
        self.comeback = Comeback(parts, self.deliveries.orphan, self._void)
        self.first_version = parts.window.first_version
        self.versions_done = parts.first_step // self.config.delivery.publish_every
        self.total_batches = (self.config.run.versions - self.versions_done) * self.config.delivery.publish_every
        self.proved = NO_VERSION
        self.stopping = False
        """Set by Ctrl-C: nothing new begins, what is in training is finished."""
        self._published: deque[Published] = deque()
        self._at_trainer = 0
        self._trained_batches = 0

    @property
    def last_version(self) -> int:
        """The version that ends the run."""
        return self.window.version_of(self.total_batches)

    # ---- the phases of a run

    async def begin(self) -> None:
        """Warm start (unless a checkpoint is ahead of it), publish the first version, evaluate it.

        In a run that goes on, what was trained after the checkpoint is trained again first, from the journal.
        """
        parts = self.parts
        if not parts.resumed:
            await warm_start(parts, self.comeback, lambda: self.stopping)
        await train_again(parts, self.comeback, lambda: self.stopping)
        if self.stopping:
            return
        self.comeback.opened()
        await self._publish_first()
        while self.proved == NO_VERSION:
            await self._deliver_next()
        await self.evaluations.evaluate("before", self.proved)

    async def _publish_first(self) -> None:
        try:
            await self.parts.trainer.publish(self.first_version, self.parts.parent_version)
        except PeerDied as death:
            self.comeback.failed(death)  # It publishes when it comes back.

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
            self.attempts.run_in(loops)
            saving = loops.create_task(self.partials.save_loop(), name="save")
            loops.create_task(self.admit_loop(loops), name="admit")
            loops.create_task(self.train_loop(loops), name="train")
            delivering = loops.create_task(self.deliver_loop(loops), name="deliver")
            delivering.add_done_callback(lambda _: saving.cancel())
        self.recorder.training_ended()

    async def finish(self) -> None:
        """Evaluate the last version and save it."""
        await self.evaluations.evaluate("after", self.proved)
        if self.proved >= 0:
            await self._save()

    def stop(self) -> None:
        """Begin no more groups; end the run in good order after what is in training."""
        self.stopping = True
        self.attempts.close(INTERRUPTED)
        self.waits.ring()

    def published(self, announcement: Published) -> None:
        """The trainer has announced a version."""
        self.comeback.announced(announcement.manifest.version)
        self.recorder.version_published(announcement.manifest, announcement.snapshot_seconds)
        self._published.append(announcement)
        self.waits.moved()

    # ---- ADMIT

    async def admit_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Go on with the groups of an earlier life, then start groups while the window has slots for them."""
        await self._start(self._take_up(), tasks)
        while not self._admitted_all():
            await self.waits.until("admit", self._explain_admission, self._may_admit)
            await self._start([self._admit() for _ in range(0 if self.stopping else self.window.free)], tasks)
        if self.stopping:
            await self.attempts.cancel_running()

    async def _start(self, groups: list[tuple[Group, list[AnyEpisode]]], tasks: asyncio.TaskGroup) -> None:
        if self.synchronous:
            # All first requests leave in one message: the engine's schedule follows from it alone.
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
        group = Group(id=group_id, prompt=attempt.prompt, version=self.proved)
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
        self.partials.ended(episodes)
        self.attempts.ended(group)
        self.waits.moved()

    # ---- groups of an earlier life

    def _take_up(self) -> list[tuple[Group, list[AnyEpisode]]]:
        """What an earlier life of the run had in flight: complete groups are judged, the others are to be run."""
        unfinished = []
        prompts = {prompt.id: prompt for prompt in self.parts.task.train} if self.parts.left else {}
        for left in self.parts.left:
            group = Group(id=left.id, prompt=prompts[left.prompt], version=left.version, rollouts=left.rollouts)
            if left.complete:
                self.attempts.taken_up(group)
            else:
                unfinished.append((group, self._resume_group(group, left)))
        return unfinished

    def _resume_group(self, group: Group, left: LeftGroup) -> list[AnyEpisode]:
        self.partials.resumed(left.partial)
        episodes = self.episodes.resumed(group, left.members, left.partial)
        self.attempts.started(group, episodes)
        return episodes

    # ---- TRAIN

    async def train_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Hand batches to the trainer, in order, as soon as both are there."""
        while self.window.batches < self.total_batches and not self.stopping:
            await self.waits.until("train", self._explain_training, self._may_train)
            groups = None if self.stopping else self.window.take()
            if groups is None:
                continue
            self._at_trainer += 1
            tasks.create_task(self._train_batch(groups, self.window.batches), name="step")
        # With oversampling there may be groups that no batch needs any more.
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
        step = self.parts.first_step + batches
        report = None
        while report is None:
            await self.comeback.turn(step)
            # Only now: a trainer that came back may have published its weights under another id.
            version = self.window.version_of(batches - 1)
            batch = make_batch(
                self.config, groups, step=step, version=version, republished=tuple(self.window.republished)
            )
            made = version + 1 if batches % self.config.delivery.publish_every == 0 else None
            save = made is not None and self._save_due(made)
            try:
                report = await self.parts.trainer.train(batch, publish=made, parent=version, save=save)
            except PeerDied as death:
                self.comeback.failed(death)
        self._at_trainer -= 1
        self._trained_batches += 1
        self.recorder.step_ended(batch, groups, report)
        self.comeback.trained(step)
        self.waits.moved()

    # ---- DELIVER

    async def deliver_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Bring every published version to the engines, and free the slots of what it was trained on."""
        while self.proved < self.last_version and not self._delivered_all():
            if not await self._deliver_next():
                return
            if self.proved < self.last_version:
                await self.evaluations.proved(self.proved, tasks)
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
        manifest = self._published.popleft().manifest
        if not await self.deliveries.deliver(manifest):
            return True
        self.proved = manifest.version
        self.recorder.version_proved(self.proved)
        self.waits.moved()
        return True

    def _void(self, version: int) -> None:
        """What was published before this version went with the trainer that published it."""
        self._published = deque(one for one in self._published if one.manifest.version >= version)
        self.deliveries.void(version)

    # ---- checkpoints

    def _save_due(self, version: int) -> bool:
        every = self.config.training.checkpoint_every
        return bool(every) and (self.versions_done + self._count(version)) % every == 0 and version < self.last_version

    def _count(self, version: int) -> int:
        return version - self.window.version_of(0)

    async def _save(self) -> None:
        path = None
        while path is None:
            await self.comeback.here()
            try:
                path = await self.parts.trainer.save(self.proved)
            except PeerDied as death:
                self.comeback.failed(death)
        self.recorder.saved(self.proved, path)
        self.waits.moved()

"""The recorder writes and shows everything that happens in a run, with one method per event.

The ledgers are checked while they are written: a group or rollout that would end twice, or never, raises an error here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.buffer.journal import Journal, Recovered
from headrace.buffer.ledger import Ledgers
from headrace.buffer.window import Window
from headrace.channel.heartbeats import Heartbeat
from headrace.delivery.base import Manifest, Proof
from headrace.observe.drift import LengthDrift
from headrace.observe.metrics import MetricsLog, describe_end
from headrace.observe.progress import Progress
from headrace.observe.spans import Activity, RunClock
from headrace.observe.summary import lag_mean_and_max
from headrace.observe.timeline import Timeline
from headrace.pipeline.run_view import RunView
from headrace.rollouts.evaluation import EvaluationResult
from headrace.training.base import StepReport
from headrace.types import (
    STEP_SECONDS,
    Batch,
    Group,
    Rollout,
    Trace,
    Version,
    held_back_seconds,
)

Moment = Literal["before", "during", "after"]


class Recorder:
    """The journal, the metrics, the timeline and the display of one run."""

    def __init__(
        self,
        journal: Journal,
        metrics: MetricsLog,
        timeline: Timeline | None,
        progress: Progress,
        window: Window,
        *,
        clock: RunClock,
        versions_total: int,
        versions_done: int,
        before: Recovered,
        record: bool = False,
    ) -> None:
        """`before` is what previous processes of the run left in the journal.

        With `record`, the schedule is journalled too.
        """
        self._journal = journal
        self._metrics = metrics
        self._timeline = timeline
        self._window = window
        self._clock = clock
        self._next_group = before.next_group
        self._versions_done = versions_done
        self._running: dict[int, tuple[Group, float]] = {}
        """The groups under way, by id, each with the time when it was admitted or taken up from a previous process."""
        self._drift = LengthDrift()
        self._record = record
        self._activity = Activity()
        self._peak_memory: dict[str, int] = {}
        """The most bytes of GPU memory that each process has held, by process."""
        self._view = RunView(progress, window, versions_total)
        self.ledgers = Ledgers(before.groups, before.rollouts, policy=window.policy)
        self.checkpoint: Path | None = None

    @property
    def phase(self) -> str:
        """The present phase of the run as a whole."""
        return self._view.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._view.phase = phase

    def now(self) -> float:
        """Return the wall time, as the journal stores it."""
        return self._clock.to_wall(time.monotonic())

    def next_group_id(self) -> int:
        """Return an id that no group attempt of this run has had."""
        self._next_group += 1
        return self._next_group - 1

    # ---- groups

    def admitted(self, group: Group, rollout_ids: Sequence[str], drawn: int) -> None:
        """Record that a group has taken its slot; nothing of it has been generated yet.

        `drawn` is the position of the prompt source.
        """
        self._running[group.id] = (group, self.now())
        self.ledgers.admitted(group.id, rollout_ids)
        self._journal.admitted(group, rollout_ids)
        self._journal.meta("drawn", drawn)
        self._scheduled("admit", group_id=group.id, version=group.version)

    def resumed(self, group: Group, rollout_ids: Sequence[str]) -> None:
        """Record that a group that a previous process admitted continues."""
        self._running[group.id] = (group, self.now())
        self.ledgers.admitted(group.id, rollout_ids)

    def sampled(self, rollout_id: str, index: int, tokens: Trace) -> None:
        """Record the next tokens of a running rollout."""
        self._journal.partial(
            Rollout(id=rollout_id, index=index, traces=[tokens], ending="aborted", reason="not ended yet")
        )

    def discarded(self, rollout_id: str, tokens: int) -> None:
        """Record that tokens of a previous process cannot be used."""
        self._journal.partial_discarded(rollout_id)
        self._journal.restarted("controller", "saved tokens were of no use", regenerated_tokens=tokens)

    def rollouts_ended(self, group: Group) -> None:
        """Record that all rollouts of a group have ended and are scored."""
        for rollout in group.rollouts:
            if rollout.ending == "failed":
                self.ledgers.rollout_failed(rollout.id, rollout.reason)
            self._journal.rollout_ended(rollout)
        self._drift.generated.extend(rollout.sampled_tokens for rollout in group.usable)
        self._scheduled("complete", group_id=group.id)

    def rollouts_left(self, left: Mapping[str, str]) -> None:
        """Record the rollouts that are not trained, by id, with the reasons. Their group continues without them."""
        for rollout_id, reason in left.items():
            self.ledgers.rollout_dropped(rollout_id, reason)
            self._journal.rollout_dropped(rollout_id, reason)

    def group_ended(
        self,
        group: Group,
        state: Literal["trained", "dropped", "failed"],
        reason: str = "",
        step: int | None = None,
        version: int | None = None,
    ) -> None:
        """Record how a group attempt ended. `version` is the version that it trained, or was too late for."""
        version = self._window.trained_version if version is None else version
        _, admitted = self._running.pop(group.id)
        self.ledgers.group_ended(group.id, state, reason)
        self._journal.group_ended(group.id, state, reason, step)
        described = describe_end(group, reason or state, version, self._window.republished)
        self._metrics.write("group", **described, seconds=self.now() - admitted)
        if state == "failed":
            self._view.note(f"group {group.id} failed: {reason}")

    def abandon(self, reason: str) -> None:
        """End all groups that are still under way: the run ends before they do."""
        for group, _ in list(self._running.values()):
            self.group_ended(group, "dropped", reason)

    # ---- steps

    def step_ended(self, batch: Batch, groups: Sequence[Group], report: StepReport) -> None:
        """Record that the trainer has made an optimizer step."""
        policy = batch.objective == "policy"
        lags = Counter(batch.lags().tolist()) if policy else Counter()
        lag_mean, lag_max = lag_mean_and_max(lags)
        rewards = [rollout.reward for group in groups for rollout in group.usable if rollout.reward is not None]
        reward = float(np.mean(rewards)) if rewards else None
        for group in groups:
            self._scheduled("consume", group_id=group.id, step=batch.step, version=batch.version)
            self.group_ended(group, "trained", step=batch.step, version=batch.version)
            self._drift.trained.extend(rollout.sampled_tokens for rollout in group.usable)
        self._journal.step(
            step=batch.step,
            version=batch.version,
            objective=batch.objective,
            groups=len(groups),
            rollouts=sum(len(group.usable) for group in groups),
            tokens=len(batch.token_ids),
            trained_tokens=batch.trained_tokens,
            lag_histogram=lags,
            reward_mean=reward,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            seconds=report.seconds,
            metrics=report.metrics,
            policy=batch.policy,
        )
        self._metrics.write(
            "step",
            step=batch.step,
            version=batch.version,
            objective=batch.objective,
            reward=reward,
            loss=report.loss,
            grad_norm=report.grad_norm,
            learning_rate=report.learning_rate,
            trained_tokens=batch.trained_tokens,
            lag_mean=lag_mean,
            lag_max=lag_max,
            seconds=report.seconds,
            skipped=report.skipped,
            skipped_steps=report.skipped_steps,
            length_drift=self._drift.distance(),
            filtered=self._window.filtered_rate,
            **report.metrics,
        )
        if warning := self._drift.warning():
            self._view.note(warning)
        if report.skipped:
            why = "its batch has no token to train" if math.isfinite(report.grad_norm) else "its gradient is not finite"
            self._view.note(f"step {batch.step} was skipped: {why}")
        self._view.stepped(batch, lags, reward)

    # ---- versions

    def version_published(self, manifest: Manifest, snapshot_seconds: float) -> None:
        """Record that the trainer has published a version."""
        self._journal.version(
            Version(
                id=manifest.version,
                parent=manifest.parent,
                step=manifest.step,
                digest=manifest.digest,
                policy=manifest.policy,
            )
        )
        self._metrics.write("version", version=manifest.version, step=manifest.step, snapshot_seconds=snapshot_seconds)

    def delivered(self, proof: Proof) -> None:
        """Record an engine's answer to a delivery."""
        self._journal.delivery(
            version=proof.version,
            engine=proof.engine,
            accepted=proof.accepted,
            quarantined=proof.quarantined,
            reason=proof.reason,
            staged_digest=proof.staged_digest,
            live_digest=proof.live_digest,
            canary_error=proof.canary_error,
            stage_seconds=proof.stage_seconds,
            swap_seconds=proof.swap_seconds,
            policy=self._window.policy,
        )
        if proof.accepted:
            self._scheduled("swap", version=proof.version, engine=proof.engine)
        else:
            self._view.note(f"{proof.engine} refused version {proof.version}: {proof.reason}")

    def version_proved(self, version: int) -> None:
        """Record that a version is declared proved."""
        self._view.proved(self._versions_done + self._window.count(version))

    def evaluated(self, version: int, moment: Moment, result: EvaluationResult, started: float) -> None:
        """Record the answers to held-out prompts."""
        self._journal.evaluation(
            version=version,
            moment=moment,
            prompts=result.prompts,
            samples=result.samples,
            pass_1=result.pass_1,
            pass_k=result.pass_k,
            reward_mean=result.reward_mean,
            tokens_mean=result.tokens_mean,
            started=started,
            ended=self.now(),
            policy=self._window.policy,
        )
        for answer in result.answers:
            self._journal.sample(
                version=version,
                moment=moment,
                prompt=answer.prompt,
                question=answer.question,
                answer=answer.answer,
                reward=answer.reward,
                policy=self._window.policy,
            )
        self._metrics.write("evaluation", version=version, moment=moment, pass_1=result.pass_1, pass_k=result.pass_k)
        self._view.evaluated(result.pass_1)
        self._view.note(
            f"held-out {moment} training, version {version}: {result.pass_1:.3f} right of {result.prompts} prompts"
            + (f", {result.pass_k:.3f} within {result.k} tries" if result.samples > 1 else "")
            + (f", {result.failed} failed" if result.failed else "")
        )

    def saved(self, version: int, path: Path) -> None:
        """Record that a checkpoint was written."""
        self.checkpoint = path
        self._journal.meta("checkpoint", {"version": version, "path": str(path)})

    # ---- the run as a whole

    def training_started(self) -> None:
        """Record that the first group is about to be admitted."""
        self._journal.meta("train_started", self.now())

    def training_ended(self) -> None:
        """Record that training has ended."""
        self._journal.meta("train_ended", self.now())

    def beat(self, process: str, beat: Heartbeat) -> None:
        """Record what a process did since its last heartbeat."""
        interval = self._activity.beat(process, beat.time, beat.spans, beat.generated_tokens)
        if self._timeline is not None:
            self._timeline.add(process, beat.spans)
        self._journal.activity(
            process=process,
            started=self._clock.to_wall(interval.started),
            ended=self._clock.to_wall(interval.ended),
            busy_seconds=interval.busy,
            generated_tokens=interval.tokens,
        )
        if beat.peak_memory_bytes > self._peak_memory.get(process, 0):
            self._peak_memory[process] = beat.peak_memory_bytes
        self._view.beat(process, beat.phase, interval)

    def restarted(self, process: str, reason: str, steps: tuple[int, int] | None = None) -> None:
        """Record that a process died and is restarted.

        The tokens that it sampled after its last delta are sampled again.
        """
        seconds = held_back_seconds(self.ledgers.rollouts.counts().in_flight) + STEP_SECONDS
        unseen = round(self._activity.died(process) * seconds)
        self._journal.restarted(process, reason, steps=steps, regenerated_tokens=unseen)

    def run_resumed(self, steps: tuple[int, int], regenerated_tokens: int) -> None:
        """Record that the run is resumed.

        The steps after `steps[0]`, up to `steps[1]`, are trained again from the journal.
        """
        self._journal.restarted("controller", "resumed", steps=steps, regenerated_tokens=regenerated_tokens)

    def flush(self) -> None:
        """Wait until everything recorded so far is committed to the journal.

        This blocks; it may be called from any thread.
        """
        self._journal.flush()

    @property
    def journal_path(self) -> Path:
        """The path of the journal, for readers."""
        return self._journal.path

    def _scheduled(self, event: Literal["admit", "complete", "consume", "swap"], **facts: Any) -> None:
        if self._record:
            self._journal.scheduled(event, **facts, policy=self._window.policy)

    def show(self) -> None:
        """Refresh the display."""
        self._view.show()

    def note(self, line: str) -> None:
        """Show a line to the people who watch."""
        self._view.note(line)

    def close(self, outcome: str) -> None:
        """Write everything to disk and check the ledgers."""
        self._view.close()
        if self._peak_memory:
            self._journal.meta("peak_memory_bytes", self._peak_memory)
        self._journal.meta("outcome", outcome)
        self._journal.meta("ended", self.now())
        self._journal.close()
        self._metrics.close()
        if self._timeline is not None:
            self._timeline.close()
        self.ledgers.check()

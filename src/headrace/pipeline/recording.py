"""The recorder writes and shows everything that happens in a run, with one method per event.

An optimizer step is shown, and written to the metrics, only once its record in the journal is on the disk. The ledgers
are checked while they are written: a group or rollout that would end twice, or never, raises an error here.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.buffer.filters import FILTERS
from headrace.buffer.journal import Journal, Recovered
from headrace.buffer.ledger import Ledgers
from headrace.buffer.window import Window
from headrace.channel.heartbeats import Heartbeat
from headrace.delivery.base import Manifest, Proof
from headrace.errors import one_line
from headrace.observe.advice import Advice, Advisor
from headrace.observe.curves import Pace, of_answers, of_tasks
from headrace.observe.metrics import LengthDrift, MetricsLog, describe_end
from headrace.observe.progress import ProcessActivity, Progress, RunSnapshot
from headrace.observe.records import (
    ADVICE,
    ENGINES,
    SKIPPED_EVALUATION,
    DeliveryRecord,
    EvaluationRecord,
    SampleRecord,
    StepRecord,
)
from headrace.observe.spans import Activity, RunClock, Timeline
from headrace.observe.summary import lag_mean_and_max, passes_in_words
from headrace.rollouts.base import TOO_LONG
from headrace.training.base import StepReport
from headrace.types import STEP_SECONDS, Batch, Group, Rollout, Trace, Version, held_back_seconds

REWARD_MEMORY = 0.9
"""The weight of the past in the moving mean of the reward that the display shows."""
BUSY_MEMORY = 0.7
"""The weight of the past in the moving mean of how busy a process is."""
TOLD_AGAIN = (10, 100, 1000, 10_000)
"""The numbers of groups that failed for one reason at which the reason is told again."""


@dataclass(frozen=True)
class Outputs:
    """The files that a run writes, and its display."""

    journal: Journal
    metrics: MetricsLog
    progress: Progress
    clock: RunClock
    timeline: Timeline | None = None


class Recorder:
    """The journal, the metrics, the timeline and the display of one run."""

    def __init__(
        self,
        outputs: Outputs,
        window: Window,
        *,
        versions_total: int,
        versions_done: int = 0,
        before: Recovered,
        record: bool = False,
        advisor: Advisor | None = None,
    ) -> None:
        """`before` is what previous processes left in the journal. With `record`, the schedule is journalled too."""
        self._advisor = advisor or Advisor()
        self.journal = outputs.journal
        self._metrics = outputs.metrics
        self._timeline = outputs.timeline
        self._progress = outputs.progress
        self._clock = outputs.clock
        self._window = window
        self.group_ids = count(before.next_group)
        """The ids that no group attempt of this run has had."""
        self._running: dict[int, tuple[Group, float]] = {}
        """The groups under way, by id, each with the time when it was admitted or taken up from a previous process."""
        self._drift = LengthDrift()
        self._lengths: dict[int, list[int]] = {}
        """The lengths of all answers of each group whose rollouts have ended and whose fate is open, by group id."""
        self._pace = Pace()
        self._record = record
        self._activity = Activity()
        self._peak_memory: dict[str, int] = {}
        """The most bytes of GPU memory that each process has held, by process."""
        self._lags: Counter[int] = Counter()
        self._failures: Counter[str] = Counter()
        """The number of failed groups by reason. Each reason is told once, and again when there are many more."""
        self._unreported: deque[tuple[Future[None], Callable[[], None]]] = deque()
        """The steps whose records may not be on the disk yet, oldest first, with what reports them."""
        self._resumed = before.resume_step > 0
        self.shown = RunSnapshot(
            version=versions_done, versions_total=versions_total, lag_bound=window.lag_bound, capacity=window.capacity
        )
        """The state of the run that `show` hands to the display."""
        self.ledgers = Ledgers(before.groups, before.rollouts)

    def now(self) -> float:
        """Return the wall time, as the journal stores it."""
        return self._clock.to_wall(time.monotonic())

    def remember(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Take the metrics that previous processes have written: what was advised then is not advised again."""
        for record in records:
            if record.get("kind") == "advice":
                self._advisor.told(str(record.get("cause")))
            elif record.get("kind") == "step" and record.get("objective") == "policy":
                # The file may have been edited or damaged since: only numbers count.
                self._advisor.step({key: value for key, value in record.items() if isinstance(value, int | float)})

    # ---- groups

    def admitted(self, group: Group, rollout_ids: Sequence[str], drawn: int | dict[str, int]) -> None:
        """Record that a group has taken its slot. `drawn` is the position of the prompt source."""
        self._pace.begin(time.monotonic())
        self._running[group.id] = (group, self.now())
        self.ledgers.admitted(group.id, rollout_ids)
        self.journal.admitted(group, rollout_ids)
        self.journal.meta("drawn", drawn)
        self._scheduled("admit", group_id=group.id, version=group.version)

    def resumed(self, group: Group, rollout_ids: Sequence[str]) -> None:
        """Record that a group that a previous process admitted continues."""
        self._running[group.id] = (group, self.now())
        self.ledgers.admitted(group.id, rollout_ids)

    def sampled(self, rollout_id: str, index: int, tokens: Trace) -> None:
        """Record the next tokens of a running rollout."""
        self.journal.partial(
            Rollout(id=rollout_id, index=index, traces=[tokens], ending="aborted", reason="not ended yet")
        )

    def discarded(self, rollout_id: str, tokens: int) -> None:
        """Record that tokens of a previous process cannot be used."""
        self.journal.partial_discarded(rollout_id)
        self.journal.restarted("controller", "saved tokens were of no use", regenerated_tokens=tokens)

    def rollouts_ended(self, group: Group) -> None:
        """Record that all rollouts of a group have ended and are scored."""
        for rollout in group.rollouts:
            if rollout.ending == "failed":
                self.ledgers.rollouts.end(rollout.id, "failed", rollout.reason)
            self.journal.rollout_ended(rollout)
        self._lengths[group.id] = [rollout.sampled_tokens for rollout in group.usable]
        self._scheduled("complete", group_id=group.id)
        failed = [rollout.reason for rollout in group.rollouts if rollout.ending == "failed"]
        # A prompt that is too long is left out from now on, which needs no advice.
        if not failed or not failed[0].startswith(TOO_LONG):
            self._advise(self._advisor.group(group.id, len(group.rollouts), len(failed), failed[0] if failed else ""))

    def rollouts_left(self, left: Mapping[str, str]) -> None:
        """Record the rollouts that are not trained, by id, with the reasons. Their group continues without them."""
        for rollout_id, reason in left.items():
            self.ledgers.rollouts.end(rollout_id, "dropped", reason)
            self.journal.rollout_dropped(rollout_id, reason)

    def group_ended(
        self,
        group: Group,
        state: Literal["trained", "dropped", "failed"],
        reason: str = "",
        step: int | None = None,
        version: int | None = None,
    ) -> None:
        """Record how a group attempt ended. `version` is the version that it trained, or was too late for."""
        self._metrics.write("group", **self._end_group(group, state, reason, step, version))
        if state == "failed":
            self._failures[reason] += 1
            if self._failures[reason] == 1:
                self.note(f"group {group.id} failed: {reason}")
            elif self._failures[reason] in TOLD_AGAIN:
                self.note(f"{self._failures[reason]} groups failed so far: {reason}")
        if reason in FILTERS:
            self._advise(self._advisor.filtered(group.id, reason))

    def _end_group(
        self,
        group: Group,
        state: Literal["trained", "dropped", "failed"],
        reason: str,
        step: int | None,
        version: int | None,
    ) -> dict[str, Any]:
        """Journal the end of a group attempt. Return its record for the metrics."""
        version = self._window.trained_version if version is None else version
        _, admitted = self._running.pop(group.id)
        self.ledgers.group_ended(group.id, state, reason)
        self.journal.group_ended(group.id, state, reason, step)
        lengths = [rollout.sampled_tokens for rollout in group.usable]
        self._drift.ended(self._lengths.pop(group.id, lengths), lengths if state == "trained" else [])
        described = describe_end(group, reason or state, version, self._window.republished)
        task = {"task": group.prompt.task} if group.prompt.task else {}
        return {**described, **task, "seconds": self.now() - admitted}

    def abandon(self, reason: str) -> None:
        """End all groups that are still under way: the run ends before they do."""
        for group, _ in list(self._running.values()):
            self.group_ended(group, "dropped", reason)

    # ---- steps

    def step_ended(self, batch: Batch, groups: Sequence[Group], report: StepReport) -> None:
        """Record that the trainer has made an optimizer step. The step is reported when its record is on the disk."""
        lags = Counter(batch.lags().tolist()) if batch.objective == "policy" else Counter()
        lag_mean, lag_max = lag_mean_and_max(lags)
        rewards = [rollout.reward for group in groups for rollout in group.usable if rollout.reward is not None]
        reward = float(np.mean(rewards)) if rewards else None
        ends = []
        for group in groups:
            self._scheduled("consume", group_id=group.id, step=batch.step, version=batch.version)
            ends.append(self._end_group(group, "trained", "", batch.step, batch.version))
        figures: dict[str, Any] = {
            "step": batch.step,
            "version": batch.version,
            "objective": batch.objective,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "trained_tokens": batch.trained_tokens,
            "seconds": report.seconds,
        }
        step = StepRecord(
            **figures,
            groups=len(groups),
            rollouts=sum(len(group.usable) for group in groups),
            tokens=len(batch.token_ids),
            reward_mean=reward,
        )
        curves: dict[str, float | None] = {}
        if batch.objective == "policy":
            curves = {"lag_mean": lag_mean, "lag_max": lag_max, **of_answers(groups, batch.logprobs[batch.trained])}
            curves |= of_tasks(groups)
            curves |= self._pace.step(time.monotonic(), batch.trained_tokens)
        curves |= report.metrics
        figures |= {
            "reward": reward,
            "lag_mean": lag_mean,
            "lag_max": lag_max,
            "skipped": report.skipped,
            "skipped_steps": report.skipped_steps,
            "length_drift": self._drift.distance(),
            "filtered": self._window.filtered_rate,
            **curves,
        }
        notes = [warning] if (warning := self._drift.warning()) else []
        if report.skipped:
            what = "gradient" if math.isfinite(report.loss) else "loss"
            why = "its batch has no token to train" if math.isfinite(report.grad_norm) else f"its {what} is not finite"
            notes.append(f"step {batch.step} was skipped: {why}")

        advised = self._journalled(self._advisor.step(figures), batch.step) if batch.objective == "policy" else []

        def tell() -> None:
            for end in ends:
                self._metrics.write("group", **end)
            self._metrics.write("step", **figures)
            for line in notes:
                self.note(line)
            self._show_step(batch, lags, reward)
            for advice in advised:
                self._tell(advice)

        self._unreported.append((self.journal.step(step, lags, curves, batch.policy), tell))
        self._report_steps()

    def _advise(self, found: Sequence[Advice]) -> None:
        """Record and show why the run does not learn."""
        for advice in self._journalled(found, max(0, self.shown.step)):
            self._tell(advice)

    def _journalled(self, found: Sequence[Advice], step: int) -> list[dict[str, Any]]:
        """Journal advice. Return it as records, which are told when the step is."""
        records = [{"cause": advice.cause, "step": step, "line": advice.line} for advice in found]
        for record in records:
            self.journal.meta(f"{ADVICE}{record['cause']}", record, once=True)
        return records

    def _tell(self, advice: dict[str, Any]) -> None:
        self._metrics.write("advice", **advice)
        self.note(f"advice: {advice['line']}")

    def _report_steps(self) -> None:
        """Report the steps whose records are on the disk."""
        while self._unreported and self._unreported[0][0].done():
            self._unreported.popleft()[1]()

    def _show_step(self, batch: Batch, lags: Counter[int], reward: float | None) -> None:
        """Show a step. Supervised steps are numbered up to 0, and change only the step and the message."""
        shown = self.shown
        shown.step = batch.step
        if batch.objective == "imitation":
            shown.message = f"{-batch.step} supervised steps left" if batch.step else ""
            return
        self._lags += lags
        shown.lag_histogram = dict(self._lags)
        shown.trained_tokens += batch.trained_tokens
        if reward is not None:
            before = shown.reward_mean
            shown.reward = reward
            shown.reward_mean = reward if before is None else REWARD_MEMORY * before + (1 - REWARD_MEMORY) * reward

    # ---- versions

    def version_published(self, manifest: Manifest, snapshot_seconds: float) -> None:
        """Record that the trainer has published a version."""
        self.journal.version(
            Version(
                id=manifest.version,
                parent=manifest.parent,
                step=manifest.step,
                digest=manifest.digest,
                policy=manifest.policy,
            )
        )
        self._metrics.write("version", version=manifest.version, step=manifest.step, snapshot_seconds=snapshot_seconds)

    def version_served(self, count: int) -> None:
        """Show that this many versions are served, after the steps behind them."""

        def tell() -> None:
            self.shown.version = count

        if self._unreported:
            self._unreported.append((self._unreported[-1][0], tell))
        else:
            tell()

    def delivered(self, proof: Proof) -> None:
        """Record an engine's answer to a delivery."""
        proof = msgspec.structs.replace(proof, reason=one_line(proof.reason))
        digests = {"staged_digest": f"{proof.staged_digest:016x}", "live_digest": f"{proof.live_digest:016x}"}
        delivery = DeliveryRecord(**msgspec.structs.asdict(proof) | digests, time=self.now())
        self.journal.delivery(delivery, self._window.policy)
        if proof.accepted:
            self._scheduled("swap", version=proof.version, engine=proof.engine)
        else:
            self.note(f"{proof.engine} refused version {proof.version}: {proof.reason}")

    def teacher_refreshed(self, teacher: str, manifest: Manifest, proof: Proof) -> None:
        """Record the answer of a teacher's process to a version of a teacher that follows the policy."""
        self._metrics.write(
            "teacher",
            teacher=teacher,
            version=proof.version,
            step=manifest.step,
            accepted=proof.accepted,
            digest=f"{manifest.digest:016x}",
            live_digest=f"{proof.live_digest:016x}",
            canary_error=proof.canary_error,
        )
        if not proof.accepted:
            self.note(f"the teacher {teacher!r} refused version {proof.version}: {one_line(proof.reason)}")

    def evaluated(self, evaluation: EvaluationRecord, answers: Sequence[SampleRecord], failed: int) -> None:
        """Record the answers to held-out prompts."""
        version, moment, samples = evaluation.version, evaluation.moment, evaluation.samples
        pass_1, pass_k = evaluation.pass_1, evaluation.pass_k
        self.journal.evaluation(evaluation, self._window.policy)
        for answer in answers:
            self.journal.sample(answer, self._window.policy)
        versions, tasks = msgspec.json.decode(evaluation.versions), msgspec.json.decode(evaluation.tasks)
        passes, sets = msgspec.json.decode(evaluation.passes), msgspec.json.decode(evaluation.sets)
        parts = {**tasks, **{f"sets/{name}": found for name, found in sets.items()}}
        of_parts = {f"{name}/{key}": value for name, found in parts.items() for key, value in found.items()}
        own = {"version": version, "moment": moment, "pass_1": pass_1, "pass_k": pass_k, "versions": versions}
        self._metrics.write("evaluation", **own, **passes, **of_parts)
        self.shown.heldout = pass_1
        when = "again, as the run goes on" if moment == "before" and self._resumed else f"{moment} training"
        each = ", ".join(f"{name} {found['pass_1']:.3f}" for name, found in tasks.items())
        self.note(
            f"held-out {when}, version {version}: {pass_1:.3f} right of {evaluation.prompts} prompts"
            + (f", {pass_k:.3f} within {samples} tries" if samples > 1 else "")
            + (f", {failed} failed" if failed else "")
            + (f" ({each})" if each else "")
            + "".join(f", {text}" for text in passes_in_words(passes))
        )
        for name, found in sets.items():
            told = ", ".join([f"{found['pass_1']:.3f} right of {found['prompts']} prompts", *passes_in_words(found)])
            self.note(f"held-out {when}, version {version}, set {name}: {told}")

    def evaluation_skipped(self, version: int, moment: str, reason: str) -> None:
        """Record that an evaluation was due and has no result."""
        skipped = {"version": version, "moment": moment, "reason": reason}
        self.journal.meta(f"{SKIPPED_EVALUATION}{version:09d} {moment}", skipped)
        self._metrics.write("evaluation_skipped", **skipped)
        self.note(f"held-out {moment} training, version {version}: not evaluated, {reason}")

    def saved(self, version: int, path: Path) -> None:
        """Record that a checkpoint was written."""
        self.journal.meta("checkpoint", {"version": version, "path": str(path)})

    # ---- the run as a whole

    def beat(self, process: str, beat: Heartbeat) -> None:
        """Record what a process did since its last heartbeat. Only the tokens of the policy count as generated."""
        if process.startswith("scorer-"):
            beat = msgspec.structs.replace(beat, generated_tokens=0)
        started, busy_seconds = self._activity.beat(process, beat.time, beat.spans, beat.generated_tokens)
        self._pace.beat(process, beat.time - started, busy_seconds, beat.generated_tokens)
        if self._timeline is not None:
            self._timeline.add(process, beat.spans)
        self.journal.activity(
            process=process,
            started=self._clock.to_wall(started),
            ended=self._clock.to_wall(beat.time),
            busy_seconds=busy_seconds,
            generated_tokens=beat.generated_tokens,
        )
        if beat.peak_memory_bytes > self._peak_memory.get(process, 0):
            self._peak_memory[process] = beat.peak_memory_bytes
        self.shown.generated_tokens += beat.generated_tokens
        before = self.shown.processes.get(process, ProcessActivity())
        fraction = busy_seconds / (beat.time - started) if beat.time > started else 0.0
        busy = BUSY_MEMORY * before.busy_fraction + (1 - BUSY_MEMORY) * fraction
        self.shown.processes[process] = ProcessActivity(phase=beat.phase, busy_fraction=busy)

    def restarted(
        self, process: str, reason: str, steps: tuple[int, int] | None = None, tokens: int | None = None
    ) -> None:
        """Record that a process is restarted. `tokens` (by default those after its last delta) are sampled again."""
        if tokens is None:
            seconds = held_back_seconds(self.ledgers.rollouts.counts().in_flight) + STEP_SECONDS
            tokens = round(self._activity.died(process) * seconds)
        self.journal.restarted(process, one_line(reason), steps=steps, regenerated_tokens=tokens)

    def resized(self, before: int, ranks: Sequence[int], why: str) -> None:
        """Record that the number of engines is changed. A resumed run begins with the engines of these ranks."""
        self.journal.meta(ENGINES, list(ranks))
        self._metrics.write("engines", before=before, after=len(ranks), why=why)
        self.note(f"engines {before} -> {len(ranks)}: {why}")

    def left(self, process: str) -> None:
        """Record that a process has left the run."""
        self._activity.left(process)
        self.shown.processes.pop(process, None)

    def idle(self, version: int, engines: int, trainer: float, generation: float) -> None:
        """Record which share of the time trainer and engines had nothing to do, since the last such record."""
        self._metrics.write("idle", version=version, engines=engines, trainer_idle=trainer, engine_idle=generation)

    def _scheduled(self, event: Literal["admit", "complete", "consume", "swap"], **facts: Any) -> None:
        if self._record:
            self.journal.scheduled(event, **facts, policy=self._window.policy)

    def show(self) -> None:
        """Report the steps whose records are on the disk, and refresh the display."""
        self._report_steps()
        self.shown.in_flight, self.shown.ready = self._window.in_flight, self._window.ready
        self._progress.update(self.shown)

    def note(self, line: str) -> None:
        """Show a line to the people who watch."""
        self._progress.note(line)

    def close(self, outcome: str) -> None:
        """Write everything to disk and check the ledgers."""
        if self._peak_memory:
            self.journal.meta("peak_memory_bytes", self._peak_memory)
        self.journal.meta("outcome", outcome)
        self.journal.meta("ended", self.now())
        try:
            self.journal.close()
        finally:
            self.show()
            self._progress.stop()
        self._metrics.close()
        if self._timeline is not None:
            self._timeline.close()
        self.ledgers.check()

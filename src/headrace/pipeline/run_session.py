"""A run in this process, from the start of its worker processes to its summary.

A run ends in order, or with one line that says why it failed. However it ends, no process and no shared-memory segment
stays behind, the journal is closed with its ledgers balanced, and `summary.json` and `report.html` are written from the
journal.

Concrete classes of a run are chosen here, in `workers`, in `inputs` and, on the workers' side, in
`cluster.worker_main`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec

from headrace.buffer.journal import Journal
from headrace.cluster.launchers.local import hosts_of
from headrace.cluster.supervision import STOP_SECONDS
from headrace.config import Config, MixtureConfig, load_config
from headrace.config.hub import model_dir
from headrace.config.memory import longest_sequence
from headrace.config.model_dir import ModelFacts, model_facts
from headrace.config.remarks import remarks
from headrace.delivery.setup import clean
from headrace.engines.pool import EnginePool
from headrace.errors import UserError, first_cause
from headrace.gateway.agents import AgentTask
from headrace.gateway.episode import AgentEpisode
from headrace.gateway.relay import Relay
from headrace.observe.metrics import MetricsLog, read_metrics
from headrace.observe.progress import Progress
from headrace.observe.prometheus import Gauges, parse_address, serve_gauges
from headrace.observe.records import ENGINES, STRETCHES
from headrace.observe.spans import RunClock, Timeline
from headrace.observe.trackers.feed import Trackers
from headrace.pipeline.commands import command_socket
from headrace.pipeline.controller import Controller
from headrace.pipeline.inputs import ReadyTask
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Outputs
from headrace.pipeline.waits import Status, Waits, scorer_waits
from headrace.pipeline.workers import TRAINER, Workers
from headrace.review.summary import write_report, write_summary
from headrace.run_dir import RunDir, write_whole
from headrace.tasks.chat import ChatFormat
from headrace.training.base import Checkpoint
from headrace.types import NO_VERSION

SHOW_SECONDS = 0.25
WATCH_SECONDS = 1.0


class RunSession:
    """A run in this process. `execute` may be called once."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        progress: Progress,
        task: ReadyTask,
        chat: ChatFormat,
        *,
        journal: Callable[..., Journal] = Journal,
        tokenizer_known: bool = False,
        ranks: Sequence[int] | None = None,
        hub_names: Mapping[str, str] | None = None,
        stretches: Sequence[Sequence[float]] = (),
    ) -> None:
        """`journal` differs from the default only where the journal itself is measured.

        `tokenizer_known` says that the journal has the digest of the tokenizer that the run began with. `ranks` are
        those of the engines to begin with, if the run was scaled before. `hub_names` are the models and datasets of
        a new run that come from the hub, with their commits, by the key that names them. `stretches` are the times in
        which previous processes trained.
        """
        self.config = config
        self.run_dir = run_dir
        self.progress = progress
        self._task = task
        self._chat = chat
        self._journal = journal
        self._tokenizer_known = tokenizer_known
        self._ranks = ranks
        self._hub_names = hub_names
        self._stretches = stretches
        self._hosts = hosts_of(config)
        self._controller: Controller | None = None
        self._gateway: Relay | None = None
        self._gauges: Gauges | None = None
        self._status_failed = False
        self._interrupt: Callable[[], object] | None = None
        self._interrupted = False
        self._ending = False
        """Whether the processes are being ended and the records written."""
        self._listener: Callable[[dict[str, Any]], None] | None = None
        self.outcome = "failed"
        """How the run ended: `finished`, `interrupted` or `failed`."""
        self.summary: dict[str, Any] = {}
        """The figures of the run, as in `summary.json`; empty before its end."""

    @property
    def began(self) -> bool:
        """Whether a version was served. From then on the run can be resumed."""
        return self._controller is not None and self._controller.versions.proved != NO_VERSION

    @property
    def started(self) -> bool:
        """Whether all processes were ready, so that the run has something to go on from."""
        return self._controller is not None

    def interrupt(self) -> None:
        """End the run in order; if it is starting, or ends already, at once. Any thread may call this."""
        self._interrupted = True
        if self._interrupt is not None:
            self._interrupt()

    def execute(self, listener: Callable[[dict[str, Any]], None] | None = None) -> RunSession:
        """Run to the end. Raises the `HeadraceError` that ended the run otherwise.

        `listener` is called with every record of `metrics.jsonl`, in the thread of the run. It must return at once.
        """
        self._listener = listener
        try:
            asyncio.run(self._execute())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        return self

    async def _execute(self) -> None:
        self.progress.start()
        for remark in remarks(self.config, self._facts):
            self.progress.note(remark)
        with self._interruptible():
            workers: Workers | None = None
            try:
                workers = Workers(self.config, self.run_dir, self._hosts, self._ranks)
                if workers.mps.missing:
                    said = f'[pipeline] one_gpu = "mps": {workers.mps.missing}'
                    self.progress.note(f"{said}; trainer and engines take turns instead")
                await self._supervised(workers)
            except BaseExceptionGroup as failures:
                raise first_cause(failures) from None
            finally:
                self._ending = True
                await self._clean_up(workers)

    async def _clean_up(self, workers: Workers | None) -> None:
        """End all processes, and write how the run ended. Ctrl-C does not disturb this."""
        if workers is not None:
            if self._gateway is not None:
                self._gateway.close()
            # Before the run has begun, no process has anything to finish: Ctrl-C then ends them at once.
            await asyncio.gather(
                workers.fleet.stop(STOP_SECONDS if self.started else 0.0),
                self._task.close(lambda line: self.progress.note(f"{line}; the run ends without it")),
            )
            await asyncio.to_thread(workers.mps.stop)
        clean(self.config.delivery, self.run_dir.path)
        self.run_dir.status.unlink(missing_ok=True)
        try:
            if self._controller is not None:
                recorder = self._controller.recorder
                recorder.abandon("interrupted" if self.outcome == "interrupted" else "run failed")
                recorder.close(self.outcome)
                if self.run_dir.journal.is_file():
                    self.summary = write_summary(self.run_dir.path)
                    write_report(self.run_dir.path)
        finally:
            self.progress.stop()

    async def _supervised(self, workers: Workers) -> None:
        fleet, waits = workers.fleet, Waits()
        async with asyncio.TaskGroup() as guard:
            watchers = [guard.create_task(fleet.watch(), name="watch processes")]
            await self._task.start()
            await fleet.start(self.config.pipeline.start_seconds)
            # Starting may take longer than `stall_seconds`.
            waits.moved()
            facts = fleet.facts(TRAINER)
            self.progress.note(f"weights travel by {facts['transport']} ({facts['transport_why']})")
            for name in workers.engines:
                if method := fleet.facts(name).get("quantization"):
                    self.progress.note(f"{name} quantises its weights ({method}); only the canary checks the result")
                if (staging := fleet.facts(name).get("staging", "device")) != "device":
                    self.progress.note(f"{name} stages new weights: {staging} ({fleet.facts(name)['staging_why']})")
            controller = self._assemble(workers, waits)
            for line in Checkpoint.of(facts).notes:
                self.progress.note(line)
            self._controller = controller
            watchers.append(guard.create_task(controller.serve(), name="serve"))
            if self._gateway is not None:
                watchers.append(guard.create_task(self._gateway.run(), name="gateway"))
                await self._gateway.start()
            self.run_dir.keep_config()
            watchers.append(guard.create_task(self._show_loop(controller), name="show"))
            watchers.append(guard.create_task(self._watch_loop(workers, controller), name="watch stalls"))
            commands = command_socket(fleet.sockets / "cmd", self.run_dir.control, controller.scaling.ask)
            async with commands, self._served_numbers():
                await controller.begin()
                await controller.train()
                await controller.finish()
            self.outcome = "interrupted" if controller.stopping else "finished"
            for watcher in watchers:
                watcher.cancel()

    def _assemble(self, workers: Workers, waits: Waits) -> Controller:
        journal = self._journal(self.run_dir.journal, keep_rollouts=self.config.observe.keep_rollouts)
        try:
            return self._assemble_on(journal, workers, waits)
        except BaseException:
            journal.close()
            raise

    def _assemble_on(self, journal: Journal, workers: Workers, waits: Waits) -> Controller:
        config, run_dir, task = self.config, self.run_dir, self._task.task
        checkpoint, clock = Checkpoint.of(workers.fleet.facts(TRAINER)), RunClock.now()
        # Older releases recorded no temperatures. Their tokens have that of the configuration before this resume.
        journal.meta("temperature", load_config(run_dir.config).rollouts.temperature, once=True)
        before = journal.recover(
            step=checkpoint.step,
            publish_every=config.delivery.publish_every,
            policy=config.policy_name,
            outcomes=config.rollouts.curriculum,
        )
        for line in before.damage:
            self.progress.note(line)
        trackers = None
        if config.observe.trackers:
            settings = msgspec.to_builtins(config)
            trackers = Trackers(
                config.observe.trackers,
                config.run.name,
                settings,
                self.progress.note,
                options=config.observe.tracker_options,
                folder=run_dir.path / "trackers",
            )
        self._gauges = Gauges(config.run.name) if config.observe.prometheus else None
        metrics = MetricsLog(run_dir.metrics, trackers=trackers, gauges=self._gauges, listener=self._listener)
        known = read_metrics(run_dir.metrics)
        if before.last_version != NO_VERSION:
            metrics.write("resumed", step=before.resume_step)
        pool = EnginePool(list(workers.engines.values()))
        relay = self._gateway = workers.make_gateway(pool, task, self._chat, self.progress.note)
        workers.events.clear()
        self._task.scoring.connect(workers.fleet.hub)
        parts = Parts(
            config,
            task=task,
            chat=self._chat,
            pool=pool,
            trainer=workers.trainer,
            outputs=Outputs(
                journal,
                metrics,
                self.progress,
                clock,
                Timeline(run_dir.timeline, clock) if config.observe.timeline else None,
            ),
            before=before,
            checkpoint=checkpoint,
            waits=waits,
            events=workers.events,
            processes=workers.fleet,
            remote=dict(workers.engines),
            crew=workers,
            scoring=self._task.scoring,
            sets=self._task.sets,
            gateway=relay,
            agents=partial(AgentEpisode, relay=relay) if relay is not None and isinstance(task, AgentTask) else None,
            max_length=self._longest_sequence,
        )
        parts.recorder.remember(known)
        journal.meta("name", config.run.name)
        if isinstance(config.task, MixtureConfig):
            journal.meta("tasks", list(config.task.tasks))
        if not self._tokenizer_known:
            journal.meta("tokenizer", self._chat.digest)
        if self._hub_names:
            journal.meta("hub", dict(self._hub_names))
        journal.meta("started", clock.wall)
        journal.meta("outcome", "running")
        journal.meta(STRETCHES, self._stretches)
        journal.meta("lag_bound", parts.window.lag_bound)
        journal.meta("no_mps", workers.mps.missing or None)
        journal.meta("engine_facts", {name: workers.fleet.facts(name) for name in workers.engines})
        journal.meta(ENGINES, workers.ranks)
        return Controller(parts)

    def _served_numbers(self) -> contextlib.AbstractAsyncContextManager[object]:
        if self._gauges is None:
            return contextlib.nullcontext()
        return serve_gauges(parse_address(self.config.observe.prometheus), self._gauges, self.progress.note)

    @cached_property
    def _facts(self) -> ModelFacts:
        return model_facts(model_dir(self.config.model), self.config.model.weights)

    @property
    def _longest_sequence(self) -> int:
        return longest_sequence(self.config.engine.max_length, self._facts.max_positions)

    async def _show_loop(self, controller: Controller) -> None:
        while True:
            controller.recorder.show()
            await asyncio.sleep(SHOW_SECONDS)

    async def _watch_loop(self, workers: Workers, controller: Controller) -> None:
        watch, fleet, limit = controller.watch, workers.fleet, self.config.pipeline.stall_seconds
        questions = controller.parts.scoring.questions
        turns = self.config.pipeline.one_gpu == "turns" or bool(workers.mps.missing)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if fleet.restarting or questions.within_limits:
                controller.waits.moved()  # Restarts, and questions to scorers, have limits of their own.
            if turns and fleet.phases.get(TRAINER) == "stepping":
                # These may be waiting for their turn on the GPU, so that their silence is no fault.
                for name in workers.beside_trainer:
                    watch.forget(name)
            for name in watch.stuck(controller.parts.pool.running, limit / 2):
                self.progress.note(f"{name} has requests and sent no token for {limit / 2:g} s: it is ended")
                watch.forget(name)
                fleet.kill(name)
            if (gateway := self._gateway) is not None and gateway.silent_for() > limit / 2:
                self.progress.note(f"{gateway.name} has not answered for {limit / 2:g} s: it is ended")
                gateway.lost("it did not answer")
                fleet.kill(gateway.name)
            for scorer in controller.parts.scoring.processes.values():
                if scorer.hangs:
                    self.progress.note(f"{scorer.name} has answered no question in time: it is ended")
                    scorer.lost("it did not answer")
                    fleet.kill(scorer.name)
            if not self.run_dir.journal.is_file():
                raise UserError(f"{self.run_dir.path}, the directory of the run, is gone: the run ends")
            self._write_status(controller.status(fleet.phases))
            controller.waits.check(limit, scorer_waits(questions.silent()))

    def _write_status(self, status: Status) -> None:
        """Write `status.json`. The run goes on if that fails, and says so once."""
        try:
            write_whole(self.run_dir.status, msgspec.json.encode(status))
        except OSError as error:
            if not self._status_failed:
                self.progress.note(f"{self.run_dir.status} cannot be written: {error.strerror}; the run goes on")
            self._status_failed = True

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Handle `interrupt` and, in the program's main thread, Ctrl-C.

        The first one drains the run, the second ends it at once. While the run is ending, there is nothing to hasten.
        """
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()

        def interrupt() -> None:
            if self._ending:
                self.progress.note("the run is ending already: its processes stop, and its records are written")
            elif self._controller is None or self._controller.stopping:
                assert main is not None
                main.cancel()
            else:
                self.progress.note("stopping after what is in training (Ctrl-C again to stop at once)")
                self._controller.stop()

        in_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        for each in signals:
            loop.add_signal_handler(each, interrupt)
        self._interrupt = partial(loop.call_soon_threadsafe, interrupt)
        if self._interrupted:
            interrupt()
        try:
            yield
        finally:
            self._interrupt = None
            for each in signals:
                loop.remove_signal_handler(each)

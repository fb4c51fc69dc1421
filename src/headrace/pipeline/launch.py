"""This module starts or resumes a run, and runs it to its summary.

The command line and the Python API both call `start_run` and `resume_run`. The run ends in order, or with one line that
says why it failed.

However the run ends, no process and no shared-memory segment stays behind, the journal is closed with its ledgers
balanced, and `summary.json` and `report.html` are written from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from headrace.buffer.journal import Journal
from headrace.buffer.store import check_resumable
from headrace.config import Config, dump_config, with_settings
from headrace.delivery.setup import clean
from headrace.errors import DiskError, HeadraceError, UserError
from headrace.gateway.base import AgentServer
from headrace.observe.progress import Progress
from headrace.pipeline.assembly import TRAINER, Workers, assemble_with_workers
from headrace.pipeline.controller import Controller
from headrace.pipeline.inputs import ReadyTask, check_inputs
from headrace.pipeline.waits import Waits, write_status
from headrace.review.summary import write_report, write_summary
from headrace.run_dir import RunDir
from headrace.scoring.base import Scorer
from headrace.tasks.chat import ChatFormat
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
    ) -> None:
        """`journal` differs from the default only where the journal itself is measured."""
        self.config = config
        self.run_dir = run_dir
        self.progress = progress
        self._task = task
        self._chat = chat
        self._journal = journal
        self._controller: Controller | None = None
        self._gateway: AgentServer | None = None
        self.outcome = "failed"
        """How the run ended: `finished`, `interrupted` or `failed`."""
        self.summary: dict[str, Any] = {}
        """The figures of the run, as in `summary.json`; empty before its end."""

    @property
    def began(self) -> bool:
        """Whether a version was served. From then on the run can be resumed."""
        return self._controller is not None and self._controller.versions.proved != NO_VERSION

    def execute(self) -> RunSession:
        """Run to the end. Raises the `HeadraceError` that ended the run otherwise."""
        try:
            asyncio.run(self._execute())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        return self

    async def _execute(self) -> None:
        self.progress.start()
        workers: Workers | None = None
        try:
            workers = Workers(self.config, self.run_dir)
            if workers.mps.missing:
                said = f'[pipeline] one_gpu = "mps": {workers.mps.missing}'
                self.progress.note(f"{said}; trainer and engines take turns instead")
            with self._interruptible():
                await self._supervised(workers)
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        finally:
            if workers is not None:
                if self._gateway is not None:
                    await self._gateway.close()
                await workers.fleet.stop()
                await self._task.close()
                await asyncio.to_thread(workers.mps.stop)
            clean(self.config.delivery, self.run_dir.path)
            self.run_dir.status.unlink(missing_ok=True)
            try:
                if self._controller is not None:
                    recorder = self._controller.recorder
                    recorder.abandon("interrupted" if self.outcome == "interrupted" else "run failed")
                    recorder.close(self.outcome)
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
            controller, self._gateway = assemble_with_workers(
                self.config,
                workers,
                self.run_dir,
                self.progress,
                task=self._task,
                chat=self._chat,
                waits=waits,
                make_journal=self._journal,
            )
            if incomplete := facts["incomplete"]:
                self.progress.note(f"{incomplete}: not a complete checkpoint, the one before it is used")
            self._controller = controller
            watchers.append(guard.create_task(controller.serve(), name="serve"))
            if self._gateway is not None:
                await self._gateway.start()
            self.run_dir.keep_config()
            watchers.append(guard.create_task(self._show_loop(controller), name="show"))
            watchers.append(guard.create_task(self._watch_loop(workers, controller), name="watch stalls"))
            await controller.begin()
            await controller.train()
            await controller.finish()
            self.outcome = "interrupted" if controller.stopping else "finished"
            for watcher in watchers:
                watcher.cancel()

    async def _show_loop(self, controller: Controller) -> None:
        while True:
            controller.recorder.show()
            await asyncio.sleep(SHOW_SECONDS)

    async def _watch_loop(self, workers: Workers, controller: Controller) -> None:
        watch, fleet, limit = controller.watch, workers.fleet, self.config.pipeline.stall_seconds
        turns = self.config.pipeline.one_gpu == "turns" or bool(workers.mps.missing)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if fleet.restarting:
                controller.waits.moved()  # Each restart has its own deadline.
            if turns and fleet.facts(TRAINER).get("device") != "cpu" and fleet.phases.get(TRAINER) == "stepping":
                # Engines may be waiting for their turn on the GPU, so that their silence is no fault.
                for name in workers.engines:
                    watch.forget(name)
            for name in watch.stuck(controller.parts.pool.running, limit / 2):
                self.progress.note(f"{name} has requests and sent no token for {limit / 2:g} s: it is ended")
                watch.forget(name)
                fleet.kill(name)
            write_status(self.run_dir, controller.status(fleet.phases))
            controller.waits.check(limit)

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Handle Ctrl-C, in the program's main thread: the first one drains the run, the second ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()

        def interrupt() -> None:
            if self._controller is None or self._controller.stopping:
                assert main is not None
                main.cancel()
            else:
                self.progress.note("stopping after what is in training (Ctrl-C again to stop at once)")
                self._controller.stop()

        loop.add_signal_handler(signal.SIGINT, interrupt)
        loop.add_signal_handler(signal.SIGTERM, interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that a person should read: the first one of Headrace's own, or else the first one."""
    found: BaseException = failures.subgroup(HeadraceError) or failures
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def start_run(
    config: Config, progress: Progress, reward: Scorer | None = None, *, prompts: str | None = None
) -> RunSession:
    """Start a new run. A user's mistake that shows before the first version is served leaves no run directory behind.

    `reward` replaces the configured reward function. `prompts` holds JSON lines to write into the run directory, as
    `prompts.jsonl`.
    """
    run_dir = RunDir.create(config)
    session = None
    try:
        if prompts is not None:
            (run_dir.path / "prompts.jsonl").write_text(prompts)
        task, chat = check_inputs(config, reward)
        session = RunSession(config, run_dir, progress, task, chat)
        with run_dir.report_full_disk():
            return session.execute()
    except UserError as error:
        resumable = isinstance(error, DiskError) or (session is not None and session.began)
        if not (resumable and run_dir.journal.is_file()):
            shutil.rmtree(run_dir.path)
        raise


def resume_run(path: str | Path, progress: Progress, settings: Iterable[str] = ()) -> RunSession:
    """Continue a run from its newest checkpoint. `settings` change its configuration; the changes are shown.

    The changed configuration is kept once every process has started with it.
    """
    run_dir, before = RunDir.open(path)
    if not run_dir.journal.is_file():
        raise UserError(f"{path}: nothing to resume (it has no journal.db)")
    config = with_settings(before, settings)
    check_resumable(run_dir.journal)
    task, chat = check_inputs(config)
    for line in changes(before, config):
        progress.note(line)
    with run_dir.report_full_disk(), run_dir.with_trial_config(config):
        return RunSession(config, run_dir, progress, task, chat).execute()


def changes(before: Config, after: Config) -> list[str]:
    """Return one line for each key that differs."""
    old, new = dump_config(before).splitlines(), dump_config(after).splitlines()
    was = [f"config was: {line}" for line in old if line not in new]
    return was + [f"config is:  {line}" for line in new if line not in old]

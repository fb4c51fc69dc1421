"""One run from its start to its summary. The run ends in order, or with one line that says why it failed.

However the run ends, no process and no shared-memory segment stays behind, the journal is closed with its ledgers
balanced, and `summary.json` and `report.html` are written from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any

from headrace.buffer.journal import Journal
from headrace.config import Config
from headrace.delivery.setup import clean
from headrace.errors import HeadraceError
from headrace.gateway.base import AgentServer
from headrace.observe.progress import Progress
from headrace.pipeline.assembly import TRAINER, Workers, assemble_with_workers, make_workers
from headrace.pipeline.controller import Controller
from headrace.pipeline.inputs import ReadyTask
from headrace.pipeline.status import write_status
from headrace.pipeline.waits import Waits
from headrace.review.summary import write_report, write_summary
from headrace.run_dir import RunDir
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

    @property
    def began(self) -> bool:
        """Whether a version was served. From then on the run can be resumed."""
        return self._controller is not None and self._controller.proved != NO_VERSION

    def execute(self) -> dict[str, Any]:
        """Run to the end and return the summary. Raises the `HeadraceError` that ended the run otherwise."""
        try:
            return asyncio.run(self._execute())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def _execute(self) -> dict[str, Any]:
        self.progress.start()
        workers: Workers | None = None
        try:
            workers = make_workers(self.config, self.run_dir)
            if workers.no_mps:
                said = f'[pipeline] one_gpu = "mps": {workers.no_mps}'
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
                if workers.mps is not None:
                    await asyncio.to_thread(workers.mps.stop)
            clean(self.config.delivery, self.run_dir.path)
            self.run_dir.status.unlink(missing_ok=True)
            try:
                if self._controller is not None:
                    summary = self._close(self._controller)
            finally:
                self.progress.stop()
        return summary

    def _close(self, controller: Controller) -> dict[str, Any]:
        controller.recorder.abandon("interrupted" if self.outcome == "interrupted" else "run failed")
        controller.recorder.close(self.outcome)
        summary = write_summary(self.run_dir.path)
        write_report(self.run_dir.path)
        return summary

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
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if fleet.restarting:
                controller.waits.moved()  # Each restart has its own deadline.
            if self._trainer_has_the_gpu(workers):
                for name in workers.engines:
                    watch.forget(name)
            for name in watch.stuck(controller.parts.pool.running, limit / 2):
                self.progress.note(f"{name} has requests and sent no token for {limit / 2:g} s: it is ended")
                watch.forget(name)
                fleet.kill(name)
            write_status(self.run_dir, controller, fleet.phases)
            controller.waits.check(limit)

    def _trainer_has_the_gpu(self, workers: Workers) -> bool:
        """Return whether engines may be waiting for their turn on the GPU, so that their silence is no fault."""
        turns = self.config.pipeline.one_gpu == "turns" or bool(workers.no_mps)
        facts = workers.fleet.facts(TRAINER)
        return turns and facts.get("device") != "cpu" and workers.fleet.phases.get(TRAINER) == "stepping"

    @contextlib.contextmanager
    def _interruptible(self) -> Any:
        """Handle Ctrl-C: the first one drains the run, the second ends it at once.

        Works only in the program's main thread.
        """
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
    """Return the error that a person should read, of several errors at the same time.

    It is the first error of Headrace's own, or the first error if there is none of Headrace's own.
    """
    flat: list[BaseException] = []
    pending: list[BaseException] = [failures]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, HeadraceError)), flat[0])

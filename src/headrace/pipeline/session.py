"""One run from start to summary, whatever happens on the way: it ends in order, or with one line that says why.

Whatever the end is, no process and no shared-memory segment stays behind, the journal is closed with its ledgers
balanced, and `summary.json` and `report.html` are written from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from typing import Any

from headrace.config import Config
from headrace.delivery.setup import choose, clean
from headrace.errors import HeadraceError
from headrace.observe.progress import Progress
from headrace.observe.report import write_report
from headrace.observe.summary import write_summary
from headrace.pipeline.controller import Controller
from headrace.pipeline.inputs import ReadyTask
from headrace.pipeline.run_dir import RunDir
from headrace.pipeline.wiring import Wired, make_controller, wire
from headrace.tasks.chat import ChatFormat

SHOW_SECONDS = 0.25
WATCH_SECONDS = 1.0


class Session:
    """A run in this process. `execute` may be called once."""

    def __init__(self, config: Config, run_dir: RunDir, progress: Progress, task: ReadyTask, chat: ChatFormat) -> None:
        self.config = config
        self.run_dir = run_dir
        self.progress = progress
        self._task = task
        self._chat = chat
        self._controller: Controller | None = None
        self.outcome = "failed"

    def execute(self) -> dict[str, Any]:
        """Run to the end and return the summary. Raises the `HeadraceError` that ended it otherwise."""
        try:
            return asyncio.run(self._execute())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def _execute(self) -> dict[str, Any]:
        self.progress.start()
        choice = choose(self.config.delivery)
        self.progress.note(f"weights travel by {choice.transport} ({choice.why})")
        wired: Wired | None = None
        try:
            wired = wire(self.config, self.run_dir, self._task, self._chat)
            with self._interruptible():
                await self._supervised(wired)
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        finally:
            if wired is not None:
                if wired.gateway is not None:
                    await wired.gateway.close()
                await wired.fleet.stop()
                await wired.task.task.close()
            clean(self.config.delivery, self.run_dir.path)
            if self._controller is not None:
                self._controller.recorder.abandon("interrupted" if self.outcome == "interrupted" else "run failed")
                self._controller.recorder.close(self.outcome)
                summary = write_summary(self.run_dir.path)
                write_report(self.run_dir.path)
            self.progress.stop()
        return summary

    async def _supervised(self, wired: Wired) -> None:
        async with asyncio.TaskGroup() as guard:
            watchers = [guard.create_task(wired.fleet.watch(), name="watch processes")]
            await wired.task.start()
            await wired.fleet.start(self.config.pipeline.start_seconds)
            # A start may rightly take longer than a stall.
            wired.waits.moved()
            controller = make_controller(wired, self.run_dir, self.progress)
            self._controller = controller
            watchers.append(guard.create_task(controller.deliveries.run(), name="deliver"))
            if wired.gateway is not None:
                await wired.gateway.start()
            watchers.append(guard.create_task(self._show_loop(controller), name="show"))
            watchers.append(guard.create_task(self._watch_loop(controller), name="watch stalls"))
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

    async def _watch_loop(self, controller: Controller) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            controller.waits.check(self.config.pipeline.stall_seconds)

    @contextlib.contextmanager
    def _interruptible(self) -> Any:
        """Ctrl-C once drains the run, twice ends it at once. Only where this is the program's main thread."""
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
    """Of several errors of one moment, the one that a person should read: ours first, then the first one."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [failures]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            flat.append(error)
    return next((error for error in flat if isinstance(error, HeadraceError)), flat[0])

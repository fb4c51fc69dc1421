"""One simulated run: the real controller over fake engines and a simulated trainer, in virtual seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from headrace.buffer.journal import Journal, Recovered
from headrace.buffer.window import Window
from headrace.config import Config
from headrace.engines.fake import FakeEngine, Lengths
from headrace.engines.fake_policy import FakePolicy
from headrace.engines.pool import EnginePool
from headrace.observe.clock import RunClock
from headrace.observe.metrics import MetricsLog
from headrace.observe.progress import NoProgress
from headrace.pipeline.controller import Controller
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Recorder
from headrace.pipeline.session import first_cause
from headrace.pipeline.taking_up import take_up
from headrace.pipeline.waits import Waits
from headrace.sim.parts import VOCABULARY, SimChat, SimTask, SimTrainer
from headrace.tasks.source import PromptSource
from headrace.types import Batch, Prompt


def window_of(config: Config, before: Recovered | None = None) -> Window:
    """The window that a run with this configuration has, after what earlier lives of it left."""
    buffer = config.buffer
    return Window(
        buffer.groups,
        buffer.depth,
        config.delivery.publish_every,
        buffer.max_lag,
        first_version=before.last_version + 1 if before else 0,
        versions=config.run.versions - (before.reach // config.delivery.publish_every if before else 0),
        on_stale=buffer.on_stale,
        oversample=buffer.oversample,
        republished=before.republished if before else (),
    )


class SimRun:
    """Made and run inside one event loop; files go to `path`."""

    def __init__(
        self,
        config: Config,
        path: Path,
        *,
        lengths: Lengths,
        token_seconds: float,
        train_seconds: Callable[[Batch], float],
        judge: Callable[[Prompt, str], float] = lambda prompt, completion: float(len(completion) % 2),
        prompts: int = 1000,
        window: Window | None = None,
        keep_rollouts: bool = False,
    ) -> None:
        """With `window`, another policy than the configured one decides who may start and what is trained.

        On a path with the journal of an earlier run, that one goes on; the trainer then has what it trained.
        """
        policy = FakePolicy(VOCABULARY)
        journal = Journal(path / "journal.db", keep_rollouts=keep_rollouts)
        every = config.delivery.publish_every
        before = journal.recover(step=0, publish_every=every)
        self.window = window or window_of(config, before)
        self.engines = [
            FakeEngine(
                name=f"engine-{n}",
                policy=policy,
                slots=config.engine.slots,
                lengths=lengths,
                token_seconds=token_seconds,
                interrupt=config.engine.interrupt,
            )
            for n in range(config.engine.count)
        ]
        self.trainer = SimTrainer(policy, train_seconds, step=before.reach)
        self.recorder = Recorder(
            journal,
            MetricsLog(path / "metrics.jsonl"),
            None,
            NoProgress(),
            self.window,
            clock=RunClock.now(),
            versions_total=config.run.versions,
            versions_done=before.reach // every,
            before=before,
        )
        task = SimTask(prompts, judge)
        left = take_up(before, self.window, self.recorder, journal, task, before.reach)
        self.source = PromptSource(task.train, config.run.seed, curriculum=config.rollouts.curriculum)
        self.source.seek(before.drawn)
        self.source.restore(before.outcomes)
        self.controller = Controller(
            Parts(
                config=config,
                task=task,
                chat=SimChat(),
                source=self.source,
                pool=EnginePool(self.engines),
                trainer=self.trainer,
                window=self.window,
                recorder=self.recorder,
                waits=Waits(asyncio.get_running_loop().time),
                first_step=before.reach,
                checkpoint_step=before.reach,
                left=left,
                resumed=before.last_version >= 0,
                parent_version=before.last_version,
            )
        )
        self.trainer.published = self.controller.published
        self.seconds = 0.0
        """Virtual time that training took."""

    async def execute(self) -> None:
        """All phases of the run."""
        clock = asyncio.get_running_loop().time
        outcome = "failed"
        try:
            async with asyncio.TaskGroup() as guard:
                deliveries = guard.create_task(self.controller.deliveries.run())
                await self.controller.begin()
                started = clock()
                await self.controller.train()
                self.seconds = clock() - started
                await self.controller.finish()
                deliveries.cancel()
            outcome = "finished"
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        finally:
            for engine in self.engines:
                await engine.close()
            self.recorder.abandon("run failed")
            self.recorder.close(outcome)

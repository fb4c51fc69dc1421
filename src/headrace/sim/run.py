"""One simulated run: the real controller over fake engines and a simulated trainer, in virtual seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from headrace.buffer.journal import Journal
from headrace.buffer.window import Window
from headrace.channel.events import Events
from headrace.config import Config
from headrace.engines.fake import FakeEngine, Lengths
from headrace.engines.fake_policy import FakePolicy
from headrace.engines.pool import EnginePool
from headrace.observe.clock import RunClock
from headrace.observe.metrics import MetricsLog
from headrace.observe.progress import NoProgress
from headrace.pipeline.assembly import Outputs, assemble
from headrace.pipeline.session import first_cause
from headrace.pipeline.waits import Waits
from headrace.sim.parts import VOCABULARY, SimChat, SimTask, SimTrainer
from headrace.training.base import Checkpoint
from headrace.types import Batch, Prompt


class SimRun:
    """A simulated run, made and run inside one event loop. Its files go to `path`."""

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
        """Assemble the run. `window` replaces the configured policy that decides who may start and what is trained.

        If `path` holds the journal of an earlier run, that run is continued, and the trainer has all its steps.
        """
        policy, events = FakePolicy(VOCABULARY), Events()
        journal = Journal(path / "journal.db", keep_rollouts=keep_rollouts)
        before = journal.recover(step=0, publish_every=config.delivery.publish_every, policy=config.policy_name)
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
        self.trainer = SimTrainer(policy, train_seconds, events, step=before.resume_step)
        known = before.last_version >= 0
        self.controller = assemble(
            config,
            task=SimTask(prompts, judge),
            chat=SimChat(),
            pool=EnginePool(self.engines),
            trainer=self.trainer,
            outputs=Outputs(journal, MetricsLog(path / "metrics.jsonl"), NoProgress(), RunClock.now()),
            before=before,
            checkpoint=Checkpoint(step=before.resume_step, version=before.last_version, found=known),
            waits=Waits(asyncio.get_running_loop().time),
            events=events,
            window=window,
        )
        self.window = self.controller.window
        self.recorder = self.controller.recorder
        self.source = self.controller.parts.source
        self.seconds = 0.0
        """The virtual seconds that training took."""

    async def execute(self) -> None:
        """Run all phases of the run."""
        clock = asyncio.get_running_loop().time
        outcome = "failed"
        try:
            async with asyncio.TaskGroup() as guard:
                serving = guard.create_task(self.controller.serve())
                await self.controller.begin()
                started = clock()
                await self.controller.train()
                self.seconds = clock() - started
                await self.controller.finish()
                serving.cancel()
            outcome = "finished"
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        finally:
            for engine in self.engines:
                await engine.close()
            self.recorder.abandon("run failed")
            self.recorder.close(outcome)

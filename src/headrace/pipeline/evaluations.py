"""Evaluations on held-out prompts before, during and after training.

An evaluation is of one version; one runs at a time.

During training an evaluation uses a part of the engines' slots. A synchronous run evaluates between two versions, so
the evaluation uses all slots.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.pipeline.episodes import Episodes
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Moment
from headrace.rollouts.evaluation import evaluate
from headrace.types import Prompt

EVALUATION_SHARE = 4
"""An evaluation during training uses at most one in `EVALUATION_SHARE` slots of the engines."""


class Evaluations:
    """The schedule of evaluations: when held-out prompts are answered, and how many at the same time."""

    def __init__(self, parts: Parts, episodes: Episodes) -> None:
        self._parts = parts
        self._config = parts.config.evaluate
        self._episodes = episodes
        self._stopping = parts.stopping
        self._synchronous = parts.window.depth == 0
        self._running: asyncio.Task[None] | None = None

    async def proved(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Evaluate this version in `tasks` if an evaluation is due.

        The engines hold the version, and it is not the last one.
        """
        due = self._config.every and self._parts.window.count(version) % self._config.every == 0
        if due and not self._stopping.is_set() and (self._running is None or self._running.done()):
            self._running = tasks.create_task(self.evaluate("during", version), name="evaluate")
        if self._synchronous and self._running is not None:
            # Held-out requests must not mix with requests of the next version: they would change its schedule.
            await self._running

    async def evaluate(self, moment: Moment, version: int) -> None:
        """Answer the held-out prompts and record the result, unless the run is stopped meanwhile."""
        recorder, waits = self._parts.recorder, self._parts.waits
        prompts: Sequence[Prompt] = self._parts.task.heldout
        if not prompts or self._stopping.is_set():
            return
        if moment == "during":
            prompts = prompts[: self._config.during or None]
        else:
            recorder.shown.phase = "evaluating"
        started = recorder.now()
        evaluation = asyncio.create_task(
            evaluate(
                prompts,
                lambda prompt, sample: self._episodes.heldout(prompt, sample, version),
                self._parts.scoring,
                samples=self._config.samples,
                concurrency=self._concurrency(moment),
            )
        )
        evaluation.add_done_callback(lambda _: waits.moved())
        try:
            await waits.until(
                "evaluate",
                lambda: f"{len(prompts)} held-out prompts",
                lambda: evaluation.done() or self._stopping.is_set(),
            )
            if evaluation.done():
                recorder.evaluated(version, moment, evaluation.result(), started)
        finally:
            evaluation.cancel()

    def _concurrency(self, moment: Moment) -> int:
        slots = self._parts.config.engine.slots * self._parts.config.engine.processes
        return max(1, slots // EVALUATION_SHARE) if moment == "during" and not self._synchronous else slots

"""This module sends optimizer steps to the trainer in order. Each step is answered once, even if the trainer dies.

Every step waits for its turn. If the trainer dies before it answers a step, the step is sent again when the trainer is
back; `recovery` brings the trainer back to the last step that it had reported.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from headrace.errors import PeerDied
from headrace.pipeline.waits import Waits
from headrace.training.base import StepReport, TrainerHandle
from headrace.training.remote import Train
from headrace.types import Batch


class Steps:
    """The order of steps at the trainer: a step may be sent once the step before it was sent."""

    def __init__(self, trainer: TrainerHandle, waits: Waits, stopping: asyncio.Event, trained: int) -> None:
        self.trained = trained
        """The last step that the trainer has reported."""
        self._trainer = trainer
        self._waits = waits
        self._stopping = stopping
        self._asked = trained
        self._present = True

    async def train(self, step: int, order: Callable[[], Train | None]) -> tuple[Batch, StepReport] | None:
        """Make the trainer do this step. Return when the trainer has answered, however often it dies meanwhile.

        `order` is called when the step has its turn, and again after each death, because version ids may have changed.
        If it returns None, the step is given up.
        """
        while True:
            await self._waits.until(
                f"step {step}", lambda: self._explain(step), lambda: self._present and self._asked == step - 1
            )
            self._asked = step
            asked = order()
            if asked is None:
                return None
            try:
                report = await self._trainer.train(
                    asked.batch, publish=asked.publish, parent=asked.parent, save=asked.save
                )
            except PeerDied as death:
                self.unanswered(death)
                continue
            self.trained = step
            return asked.batch, report

    async def train_known(self, batch: Batch) -> StepReport | None:
        """Make the trainer do a step whose batch is known beforehand. Return None if the run is stopping."""
        done = await self.train(batch.step, lambda: None if self._stopping.is_set() else Train(batch=batch))
        self._waits.moved()
        return done[1] if done is not None else None

    async def publish(self, version: int, parent: int) -> None:
        """Ask for a version of the present weights. A trainer that dies meanwhile publishes it when it is back."""
        try:
            await self._trainer.publish(version, parent)
        except PeerDied as death:
            self.unanswered(death)

    async def save(self, version: int) -> Path:
        """Make the trainer write the present weights to a checkpoint. Return the path of the checkpoint."""
        while True:
            await self._waits.until("controller", lambda: self._explain(0), lambda: self._present)
            try:
                return await self._trainer.save(version)
            except PeerDied as death:
                self.unanswered(death)

    def unanswered(self, death: PeerDied) -> None:
        """Handle a request that failed because a process died. Raises `death` unless that was the trainer."""
        if death.peer != self._trainer.name:
            raise death
        self.away()

    @property
    def is_away(self) -> bool:
        """Whether the trainer is gone and has not come back."""
        return not self._present

    def away(self) -> None:
        """Record that the trainer is gone: no step has a turn until it is back."""
        self._present = False

    def back(self) -> None:
        """Record that the trainer is back at the last step that it had reported. The next step has its turn."""
        self._asked = self.trained
        self._present = True

    def _explain(self, step: int) -> str:
        if not self._present:
            return f"{self._trainer.name} to come back"
        return f"step {step - 1} to be sent"

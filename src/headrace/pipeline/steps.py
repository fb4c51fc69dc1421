"""Optimizer steps reach the trainer once and in order, across its deaths.

Whoever has a step waits for its turn. A step that was sent and not answered, because the trainer died, is sent again
when the trainer is back (`recovery` brings it to where its last report left it).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from headrace.errors import PeerDied
from headrace.pipeline.waits import Waits
from headrace.training.base import TrainerHandle
from headrace.training.report import StepReport
from headrace.types import NO_VERSION, Batch


class StepRequest(NamedTuple):
    """One optimizer step, as the trainer is asked for it."""

    batch: Batch
    publish: int | None = None
    """The version under which the weights are published after the step."""
    parent: int = NO_VERSION
    save: bool = False


class Steps:
    """Whose turn it is at the trainer."""

    def __init__(self, trainer: TrainerHandle, waits: Waits, trained: int) -> None:
        """`trained` is the last step that the trainer has behind it."""
        self.trained = trained
        """The last step whose report has come."""
        self._trainer = trainer
        self._waits = waits
        self._asked = trained
        self._present = True

    async def train(self, step: int, order: Callable[[], StepRequest | None]) -> tuple[Batch, StepReport] | None:
        """Have the trainer make this step; returns when it has answered, however often it died meanwhile.

        `order` is called in the step's turn, and again after each death, because the ids of versions may have changed.
        It returns None to give the step up.
        """
        while True:
            await self._turn(step)
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

    async def publish(self, version: int, parent: int) -> None:
        """Ask for a version of the present weights. A trainer that dies meanwhile publishes it when it is back."""
        try:
            await self._trainer.publish(version, parent)
        except PeerDied as death:
            self.unanswered(death)

    async def save(self, version: int) -> Path:
        """Have the present weights written to a checkpoint."""
        while True:
            await self._waits.until("controller", lambda: self._explain(0), lambda: self._present)
            try:
                return await self._trainer.save(version)
            except PeerDied as death:
                self.unanswered(death)

    def unanswered(self, death: PeerDied) -> None:
        """A request was not answered because of this death; raises it again unless it is the trainer's."""
        if death.peer != self._trainer.name:
            raise death
        self.away()

    def away(self) -> None:
        """The trainer is gone: nobody has a turn until it is back."""
        self._present = False

    def back(self) -> None:
        """The trainer is where its last report left it: the next step is the one after that."""
        self._asked = self.trained
        self._present = True

    async def _turn(self, step: int) -> None:
        await self._waits.until(
            f"step {step}", lambda: self._explain(step), lambda: self._present and self._asked == step - 1
        )
        self._asked = step

    def _explain(self, step: int) -> str:
        if not self._present:
            return f"{self._trainer.name} to come back"
        return f"step {step - 1} to be sent"

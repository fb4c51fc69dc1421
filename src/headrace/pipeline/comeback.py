"""The trainer across its deaths: it comes back where its last report left it, and steps reach it once and in order.

    died ─▶ (supervision starts it again) ─▶ returned: train again what its checkpoint lacks ─▶ publish ─▶ turns go on

What was trained after the checkpoint is trained again from the journal; nothing is generated for it. The weights are
published under the next free id, because the old one's bytes went with the old process and only on some devices are
the new weights equal to the last bit. Steps that were asked for and not answered are asked for again by who waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from headrace.errors import HeadraceError, PeerDied
from headrace.pipeline.batches import recorded_batches, warm_start_batches
from headrace.pipeline.parts import Parts
from headrace.types import NO_VERSION, Batch


class Comeback:
    """Whose turn it is at the trainer. `returned` is called by supervision, the rest by the controller's loops."""

    def __init__(self, parts: Parts, on_lost: Callable[[int], None], on_void: Callable[[int], None]) -> None:
        """`on_lost` is told the last version of a trainer that died.

        `on_void` is told, when one has come back, the version before which nothing can be fetched any more.
        """
        self._parts = parts
        self._on_lost = on_lost
        self._on_void = on_void
        self._here = True
        self._trained = parts.checkpoint_step if parts.resumed else -parts.config.warm_start.steps
        self._asked = self._trained
        self._announced = NO_VERSION
        self._opened = False

    def opened(self) -> None:
        """The first version is asked for."""
        self._opened = True

    def announced(self, version: int) -> None:
        """The trainer has published a version."""
        self._announced = max(self._announced, version)

    async def turn(self, step: int) -> None:
        """Wait until the trainer is here and this step is the next to be sent; whoever waited must send it now."""
        await self._parts.waits.until(
            f"step {step}", lambda: self._explain(step), lambda: self._here and self._asked == step - 1
        )
        self._asked = step

    async def here(self) -> None:
        """Wait until the trainer has come back, if it is away."""
        await self._parts.waits.until("controller", lambda: self._explain(0), lambda: self._here)

    def trained(self, step: int) -> None:
        """The report of a step has come and is recorded."""
        self._trained = step

    def failed(self, death: PeerDied) -> None:
        """A request was not answered, because of this death; raises it again unless it is the trainer's."""
        if death.peer != self._parts.trainer.name:
            raise death
        self.lost()

    def lost(self) -> None:
        """The trainer is gone."""
        self._here = False
        self._on_lost(self._announced)

    async def returned(self, checkpoint_step: int | None, version: int) -> None:
        """The trainer is back at this checkpoint, of `version`, or at its first weights: bring it to where it was."""
        after = -self._parts.config.warm_start.steps if checkpoint_step is None else checkpoint_step
        # From now on, and not only when the weights are there again: what was announced can be sent by nobody.
        self._on_void(self._announced + 1)
        try:
            await self._train_again(after, version)
        except PeerDied as death:
            self.failed(death)  # It will be back once more.
            return
        self._asked = self._trained
        self._here = True
        self._parts.waits.moved()

    async def _train_again(self, after: int, version: int) -> None:
        parts, until = self._parts, self._trained
        if after > until:
            raise HeadraceError(f"{parts.trainer.name} came back at step {after}, beyond the last one, {until}")
        parts.recorder.restarted(parts.trainer.name, "died", (after, until))
        await asyncio.to_thread(parts.recorder.flush)
        boundary = self._boundary()
        if boundary == after:
            await self._publish(version)
        for batch in self._batches(after, until):
            await parts.trainer.train(batch)
            parts.waits.moved()
            if batch.step == boundary:
                await self._publish(version)

    def _boundary(self) -> int | None:
        """The step behind the newest version; None while none was asked for."""
        first = self._parts.first_step
        if not self._opened or self._trained < first:
            return None
        done = self._trained - first
        return first + done - done % self._parts.config.delivery.publish_every

    async def _publish(self, parent: int) -> None:
        boundary = self._boundary()
        assert boundary is not None
        window, batches = self._parts.window, boundary - self._parts.first_step
        known = self._announced >= window.version_of(batches)
        version = window.republish(batches) if known else window.version_of(batches)
        self._on_void(version)
        await self._parts.trainer.publish(version, parent)

    def _batches(self, after: int, until: int) -> Iterator[Batch]:
        parts = self._parts
        for batch in warm_start_batches(parts.config, parts.task, parts.chat, parts.window.first_version):
            if after < batch.step <= until:
                yield batch
        if until > max(after, 0):
            for recorded in recorded_batches(parts.config, parts.recorder.journal_path, max(after, 0), until):
                yield recorded.batch

    def _explain(self, step: int) -> str:
        if not self._here:
            return f"{self._parts.trainer.name} to come back"
        return f"step {step - 1} to be sent"

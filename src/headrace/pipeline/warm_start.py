"""Supervised steps on the task's demonstrations, before the first version is published. They are journalled as such."""

from __future__ import annotations

from collections.abc import Callable

from headrace.errors import PeerDied
from headrace.pipeline.batches import warm_start_batches
from headrace.pipeline.comeback import Comeback
from headrace.pipeline.parts import Parts


async def warm_start(parts: Parts, comeback: Comeback, stopping: Callable[[], bool]) -> None:
    """Train on `[warm_start] batch` demonstrations, `steps` times; their steps are numbered up to 0."""
    if parts.config.warm_start.steps:
        parts.recorder.phase = "warm start"
    for batch in warm_start_batches(parts.config, parts.task, parts.chat, parts.window.first_version):
        report = None
        while report is None:
            await comeback.turn(batch.step)
            if stopping():
                return
            try:
                report = await parts.trainer.train(batch)
            except PeerDied as death:
                comeback.failed(death)
        parts.recorder.step_ended(batch, [], report)
        comeback.trained(batch.step)
        parts.waits.moved()

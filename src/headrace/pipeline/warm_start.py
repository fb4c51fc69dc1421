"""The warm start: supervised steps on the task's demonstrations, before the first version is published.

The journal marks these steps as supervised.
"""

from __future__ import annotations

from functools import partial

from headrace.pipeline.batches import warm_start_batches
from headrace.pipeline.parts import Parts
from headrace.pipeline.steps import StepRequest, Steps


async def warm_start(parts: Parts, steps: Steps) -> None:
    """Train `[warm_start] steps` steps on `[warm_start] batch` demonstrations each.

    The last of these steps has number 0.
    """
    if parts.config.warm_start.steps:
        parts.recorder.shown.phase = "warm start"
    for batch in warm_start_batches(parts.config, parts.task, parts.chat, parts.window.first_version):
        done = await steps.train(batch.step, partial(parts.unless_stopping, StepRequest(batch)))
        if done is None:
            return
        parts.recorder.step_ended(batch, [], done[1])
        parts.waits.moved()

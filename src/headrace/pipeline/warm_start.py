"""Supervised steps on the task's demonstrations, before the first version is published. They are journalled as such."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.algorithms.assemble import assemble_demonstrations
from headrace.errors import ConfigError
from headrace.pipeline.parts import Parts
from headrace.tasks.source import PromptSource
from headrace.types import Int32Array, Prompt


async def warm_start(parts: Parts, stopping: Callable[[], bool]) -> None:
    """Train on `[warm_start] batch` demonstrations, `steps` times; their steps are numbered up to 0."""
    config = parts.config.warm_start
    if config.steps:
        parts.recorder.phase = "warm start"
    source = PromptSource(parts.task.train, parts.config.run.seed + 1)
    for step in range(1 - config.steps, 1):
        if stopping():
            return
        pairs = [_demonstration(parts, source.draw()) for _ in range(config.batch)]
        batch = assemble_demonstrations(pairs, step=step, version=parts.window.first_version)
        parts.recorder.step_ended(batch, [], await parts.trainer.train(batch))
        parts.waits.moved()


def _demonstration(parts: Parts, prompt: Prompt) -> tuple[Int32Array, Int32Array]:
    """The tokens of a prompt, and those of a right answer with the token that ends it."""
    answer = parts.task.demonstration(prompt)
    if answer is None:
        raise ConfigError(f"[warm_start] steps: the task has no demonstration for prompt {prompt.id}")
    chat = parts.chat
    opening = chat.open(prompt.messages) if prompt.messages else chat.encode(prompt.text or "")
    return opening, np.append(chat.encode(answer), chat.stop_token_ids[0]).astype(np.int32)

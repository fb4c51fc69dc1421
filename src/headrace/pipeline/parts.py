"""What the controller is given: every part of a run, behind its protocol."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.buffer.window import Window
from headrace.config import Config
from headrace.engines.pool import EnginePool
from headrace.gateway.base import EpisodeMaker
from headrace.pipeline.recording import Recorder
from headrace.pipeline.waits import Waits
from headrace.rollouts.base import ChatFormat
from headrace.tasks.base import Task
from headrace.tasks.source import PromptSource
from headrace.training.base import TrainerHandle


@dataclass(frozen=True)
class Parts:
    """Made by `wiring`, by a test, or by a simulator."""

    config: Config
    task: Task
    chat: ChatFormat
    source: PromptSource
    pool: EnginePool
    trainer: TrainerHandle
    window: Window
    recorder: Recorder
    waits: Waits
    agents: EpisodeMaker | None = None
    """What makes episodes where agents take the turns; otherwise they come from the task's environments."""
    first_step: int = 0
    """Optimizer steps that a checkpoint has behind it."""
    resumed: bool = False
    """The trainer started from a checkpoint."""
    parent_version: int = -1
    """The version that the first published one continues."""

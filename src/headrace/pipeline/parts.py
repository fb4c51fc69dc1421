"""What the controller is given: every part of a run, behind its protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.buffer.recovery import LeftGroup
from headrace.buffer.window import Window
from headrace.config import Config
from headrace.engines.pool import EnginePool
from headrace.gateway.base import EpisodeMaker
from headrace.pipeline.recording import Recorder
from headrace.pipeline.waits import Waits
from headrace.rollouts.base import ChatFormat
from headrace.scoring.stage import Stage
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
    scoring: Stage = field(default_factory=Stage)
    """Scores every rollout when it has ended; without scorers, a reward is what an environment or an agent gave."""
    agents: EpisodeMaker | None = None
    """What makes episodes where agents take the turns; otherwise they come from the task's environments."""
    end_engine: Callable[[str], None] = lambda engine: None
    """Ends the process of an engine that is here and of no use; it is then started again like any that died."""
    first_step: int = 0
    """Optimizer steps behind the first version: those of a checkpoint, and those that are trained again after it."""
    checkpoint_step: int = 0
    """Optimizer steps that the trainer's checkpoint has behind it."""
    left: Sequence[LeftGroup] = ()
    """Groups that an earlier life of the run had in flight, oldest first; the window holds them already."""
    resumed: bool = False
    """The trainer started from a checkpoint."""
    parent_version: int = -1
    """The version that the first published one continues."""

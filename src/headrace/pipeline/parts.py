"""What the controller is given: every part of a run, behind its protocol. `assembly` puts them together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.buffer.recovery import UnfinishedGroup
from headrace.buffer.window import Window
from headrace.channel.events import Events
from headrace.cluster.base import NoProcesses, Processes
from headrace.config import Config
from headrace.engines.base import EngineProcess
from headrace.engines.pool import EnginePool
from headrace.gateway.base import EpisodeMaker
from headrace.pipeline.recording import Recorder
from headrace.pipeline.steps import StepRequest
from headrace.pipeline.waits import Waits
from headrace.rollouts.base import ChatFormat
from headrace.scoring.stage import Stage
from headrace.tasks.base import Task
from headrace.tasks.source import PromptSource
from headrace.training.base import Checkpoint, TrainerHandle


@dataclass(frozen=True)
class Parts:
    """The parts of one run."""

    config: Config
    task: Task
    chat: ChatFormat
    source: PromptSource
    pool: EnginePool
    trainer: TrainerHandle
    window: Window
    recorder: Recorder
    waits: Waits
    events: Events
    """What workers, group tasks and supervision tell the controller."""
    scoring: Stage = field(default_factory=Stage)
    """Scores every rollout when it has ended; without scorers, a reward is what an environment or an agent gave."""
    agents: EpisodeMaker | None = None
    """What makes episodes where agents take the turns; otherwise they come from the task's environments."""
    remote: Mapping[str, EngineProcess] = field(default_factory=dict)
    """The engines of the pool that are in processes of their own, by name."""
    processes: Processes = field(default_factory=NoProcesses)
    """Whoever watches over these processes and the trainer's."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """Where the trainer started from."""
    first_step: int = 0
    """Optimizer steps behind the first version: those of the checkpoint, and those that are trained again after it."""
    left: Sequence[UnfinishedGroup] = ()
    """Groups that a previous process had in flight, oldest first; the window holds them already."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by Ctrl-C: nothing new begins, what is in training is finished."""

    def unless_stopping(self, order: StepRequest) -> StepRequest | None:
        """The order, or None once the run is to stop."""
        return None if self.stopping.is_set() else order

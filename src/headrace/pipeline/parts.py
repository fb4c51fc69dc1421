"""The parts of a run that the controller is given, each behind its protocol. `assembly` puts the parts together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.buffer.recovery import UnfinishedGroup
from headrace.buffer.window import Window
from headrace.channel.events import Events
from headrace.cluster.base import Processes
from headrace.config import Config
from headrace.engines.pool import EnginePool
from headrace.engines.streams import StreamedEngine
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
    """The queue in which workers, group tasks and supervision tell the controller what happened."""
    scoring: Stage = field(default_factory=Stage)
    """The stage that scores every rollout when it has ended. Without scorers, the environment or the agent gives the
    reward."""
    agents: EpisodeMaker | None = None
    """The maker of episodes if agents take the turns. If None, episodes come from the task's environments."""
    remote: Mapping[str, StreamedEngine] = field(default_factory=dict)
    """The engines of the pool that run in their own processes, by name."""
    processes: Processes = field(default_factory=Processes)
    """The supervisor of the engine and trainer processes."""
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    """The checkpoint that the trainer started from."""
    first_step: int = 0
    """The number of optimizer steps behind the first version: the steps of the checkpoint, plus the steps after the
    checkpoint that are trained again."""
    unfinished: Sequence[UnfinishedGroup] = ()
    """The groups that a previous process had in flight, oldest first. The window holds them already."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by Ctrl-C: nothing new begins, and batches in training are finished."""

    def unless_stopping(self, order: StepRequest) -> StepRequest | None:
        """Return the request, or None once the run is stopping."""
        return None if self.stopping.is_set() else order

"""The parts of a run that the controller is given, real, simulated or in a test, each behind its protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from headrace.buffer.recovery import Recovered
from headrace.buffer.window import Window
from headrace.channel.events import Events
from headrace.cluster.base import Processes
from headrace.config import Config
from headrace.engines.pool import EnginePool
from headrace.engines.streams import StreamedEngine
from headrace.gateway.base import EpisodeMaker
from headrace.pipeline.recording import Outputs, Recorder
from headrace.pipeline.waits import Waits
from headrace.rollouts.base import ChatFormat
from headrace.scoring.base import Stage
from headrace.tasks.base import Task
from headrace.tasks.source import PromptSource
from headrace.training.base import Checkpoint, TrainerHandle


class Parts:
    """The parts of one run, which continues from what its previous processes left."""

    def __init__(
        self,
        config: Config,
        *,
        task: Task,
        chat: ChatFormat,
        pool: EnginePool,
        trainer: TrainerHandle,
        outputs: Outputs,
        before: Recovered,
        checkpoint: Checkpoint,
        waits: Waits,
        events: Events,
        processes: Processes | None = None,
        remote: Mapping[str, StreamedEngine] | None = None,
        scoring: Stage | None = None,
        agents: EpisodeMaker | None = None,
        window: Window | None = None,
    ) -> None:
        """`before` is what the journal holds of previous processes, and `checkpoint` is where the trainer starts.

        `window` replaces the window of the configuration, to try another admission policy.
        """
        buffer, every = config.buffer, config.delivery.publish_every
        self.config = config
        self.task = task
        self.chat = chat
        self.pool = pool
        self.trainer = trainer
        self.before = before
        self.checkpoint = checkpoint
        self.waits = waits
        self.events = events
        """The queue in which workers, group tasks and supervision tell the controller what happened."""
        self.processes = processes or Processes()
        """The supervisor of the engine and trainer processes."""
        self.remote = remote or {}
        """The engines of the pool that run in their own processes, by name."""
        self.scoring = scoring or Stage()
        """The stage that scores every rollout. Without scorers, the environment or the agent gives the reward."""
        self.agents = agents
        """The maker of episodes if agents take the turns. If None, episodes come from the task's environments."""
        self.first_step = before.resume_step
        """The optimizer steps behind the first version: those of the checkpoint, and those that are trained again."""
        self.versions_done = before.resume_step // every
        """The number of versions that previous processes have made."""
        self.window = window or Window(
            buffer.groups,
            buffer.depth,
            every,
            buffer.max_lag,
            # A checkpoint may be newer than the last version that a dying run could still journal.
            first_version=max(before.last_version, checkpoint.version) + 1,
            versions=config.run.versions - self.versions_done,
            on_stale=buffer.on_stale,
            oversample=buffer.oversample,
            republished=before.republished,
            policy=config.policy_name,
        )
        self.recorder = Recorder(
            outputs,
            self.window,
            versions_total=config.run.versions,
            before=before,
            record=config.pipeline.record,
        )
        self.source = PromptSource(task.train, config.run.seed, curriculum=config.rollouts.curriculum)
        self.source.seek(before.drawn)
        self.source.restore(before.outcomes)
        self.stopping = asyncio.Event()
        """Set by Ctrl-C: nothing new begins, and batches in training are finished."""

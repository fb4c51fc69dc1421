"""The parts of a run that the controller is given. Each is behind a protocol: real, simulated, or made by a test."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field

from headrace.buffer.recovery import Recovered
from headrace.buffer.window import Window
from headrace.channel.events import Events
from headrace.cluster.base import Processes
from headrace.config import Config
from headrace.config.declared import compares_answers, loss_facts
from headrace.engines.pool import EnginePool
from headrace.engines.streams import StreamedEngine
from headrace.gateway.base import EpisodeMaker, GatewayHandle
from headrace.observe.advice import Advisor, Settings
from headrace.pipeline.elastic import Crew
from headrace.pipeline.recording import Outputs, Recorder
from headrace.pipeline.waits import Waits
from headrace.rollouts.base import ChatFormat
from headrace.scoring.base import Stage
from headrace.tasks.base import Task
from headrace.tasks.mixture import make_source
from headrace.training.base import Checkpoint, TrainerHandle
from headrace.types import Prompt


@dataclass(eq=False)
class Parts:
    """The parts of one run, which continues from what its previous processes left."""

    config: Config
    _: KW_ONLY
    task: Task
    chat: ChatFormat
    pool: EnginePool
    trainer: TrainerHandle
    outputs: InitVar[Outputs]
    before: Recovered
    """What the journal holds of previous processes."""
    checkpoint: Checkpoint
    """Where the trainer starts."""
    waits: Waits
    events: Events
    """The queue in which workers, group tasks and supervision tell the controller what happened."""
    processes: Processes = field(default_factory=Processes)
    """The supervisor of the engine and trainer processes."""
    remote: dict[str, StreamedEngine] = field(default_factory=dict)
    """The engines of the pool that run in their own processes, by name."""
    crew: Crew | None = None
    """Starts and ends single engines while the run is live. If None, their number stays as it is."""
    scoring: Stage = field(default_factory=Stage)
    """The stage that scores every rollout. Without scorers, the environment or the agent gives the reward."""
    sets: Mapping[str, Sequence[Prompt]] = field(default_factory=dict)
    """The further sets of held-out prompts, by name."""
    gateway: GatewayHandle | None = None
    """The gateway's process, if there is one."""
    agents: EpisodeMaker | None = None
    """The maker of episodes if agents take the turns. If None, episodes come from the task's environments."""
    max_length: int | None = None
    """The length of the longest sequence that the engines take; None without a limit."""
    other_window: InitVar[Window | None] = None
    """Replaces the window of the configuration, to try another admission policy."""

    def __post_init__(self, outputs: Outputs, other_window: Window | None) -> None:
        config, before = self.config, self.before
        buffer, every = config.buffer, config.delivery.publish_every
        self.first_step = before.resume_step
        """The number of steps that were made before the first new batch: those in the checkpoint, and those after it
        that are trained again from the journal."""
        self.versions_done = before.resume_step // every
        """The number of versions that previous processes have made."""
        self.window = other_window or Window(
            buffer.groups,
            buffer.depth,
            every,
            buffer.max_lag,
            # A checkpoint may be newer than the last version that a dying run could still journal.
            first_version=max(before.last_version, self.checkpoint.version) + 1,
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
            versions_done=self.versions_done,
            before=before,
            record=config.pipeline.record,
            advisor=Advisor(
                Settings(
                    compares=loss_facts(config.algorithm.loss).uses_rewards
                    and compares_answers(config.algorithm.advantage),
                    synchronous=buffer.depth == 0,
                )
            ),
        )
        self.source = make_source(self.task, config.run.seed, curriculum=config.rollouts.curriculum)
        self.source.position = before.drawn
        self.source.restore(before.outcomes)
        self.stopping = asyncio.Event()
        """Set by Ctrl-C: nothing new begins, and batches in training are finished."""

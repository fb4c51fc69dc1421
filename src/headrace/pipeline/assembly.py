"""This module assembles a run: `assemble` makes the controller of every run, real, simulated or in a test.

On the controller's side, only this file and `inputs` know concrete classes; on the workers' side, only `cluster.roles`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.buffer.journal import Journal, Recovered
from headrace.buffer.window import Window
from headrace.channel.events import Events
from headrace.cluster.base import NoProcesses, Processes
from headrace.cluster.launchers.choice import make_launcher
from headrace.cluster.mps import Mps, environment_of_workers, start_mps, sweep_daemons
from headrace.cluster.supervision import Fleet
from headrace.config import Config
from headrace.config.model_dir import model_facts
from headrace.delivery.setup import prepare
from headrace.engines.pool import EnginePool
from headrace.engines.remote import RemoteEngine
from headrace.gateway.agents import AgentTask
from headrace.gateway.base import EpisodeMaker
from headrace.observe.clock import RunClock
from headrace.observe.metrics import MetricsLog
from headrace.observe.progress import Progress
from headrace.observe.timeline import Timeline
from headrace.pipeline.controller import Controller
from headrace.pipeline.extensions import make_trackers
from headrace.pipeline.inputs import ReadyTask
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Recorder
from headrace.pipeline.recovery import restore_groups
from headrace.pipeline.waits import Waits
from headrace.rollouts.base import ChatFormat
from headrace.run_dir import RunDir
from headrace.scoring.stage import Stage
from headrace.tasks.base import Task
from headrace.tasks.chat import ChatFormat as ModelChatFormat
from headrace.tasks.source import PromptSource
from headrace.training.base import Checkpoint, TrainerHandle
from headrace.training.remote import RENDEZVOUS, RemoteTrainer

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway

TRAINER = "trainer-0"
LONGEST_DEFAULT = 4096
"""The longest sequence of an engine if `[engine] max_length` is not set."""


@dataclass(frozen=True)
class Outputs:
    """The files that a run writes, and its display."""

    journal: Journal
    metrics: MetricsLog
    progress: Progress
    clock: RunClock
    timeline: Timeline | None = None


def assemble(
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
    remote: Mapping[str, RemoteEngine] | None = None,
    scoring: Stage | None = None,
    agents: EpisodeMaker | None = None,
    window: Window | None = None,
) -> Controller:
    """Make the controller of a run over these engines and this trainer, wherever they run.

    `before` is what the journal holds of previous processes, and `checkpoint` is where the trainer starts. `window`
    replaces the window of the configuration, to try another admission policy.
    """
    window = window or make_window(config, before, checkpoint)
    done = before.resume_step // config.delivery.publish_every
    recorder = Recorder(
        outputs.journal,
        outputs.metrics,
        outputs.timeline,
        outputs.progress,
        window,
        clock=outputs.clock,
        versions_total=config.run.versions,
        versions_done=done,
        before=before,
        record=config.pipeline.record,
    )
    left = restore_groups(before, window, recorder, task, checkpoint)
    source = PromptSource(task.train, config.run.seed, curriculum=config.rollouts.curriculum)
    source.seek(before.drawn)
    source.restore(before.outcomes)
    return Controller(
        Parts(
            config=config,
            task=task,
            chat=chat,
            source=source,
            pool=pool,
            trainer=trainer,
            window=window,
            recorder=recorder,
            waits=waits,
            events=events,
            scoring=scoring or Stage(),
            agents=agents,
            remote=remote or {},
            processes=processes or NoProcesses(),
            checkpoint=checkpoint,
            first_step=before.resume_step,
            unfinished=left,
        )
    )


def make_window(config: Config, before: Recovered, checkpoint: Checkpoint) -> Window:
    """Make the window of a run, which continues from what its previous processes left."""
    buffer, every = config.buffer, config.delivery.publish_every
    return Window(
        buffer.groups,
        buffer.depth,
        every,
        buffer.max_lag,
        # A checkpoint may be newer than the last version that a dying run could still journal.
        first_version=max(before.last_version, checkpoint.version) + 1,
        versions=config.run.versions - before.resume_step // every,
        on_stale=buffer.on_stale,
        oversample=buffer.oversample,
        republished=before.republished,
        policy=config.policy_name,
    )


# ---- a run with worker processes


@dataclass(frozen=True)
class Workers:
    """The worker processes of a run, and the handles to talk to them."""

    fleet: Fleet
    engines: dict[str, RemoteEngine]
    trainer: RemoteTrainer
    events: Events
    mps: Mps | None = None
    no_mps: str = ""
    """Why NVIDIA's MPS daemon does not run although it was asked for; empty otherwise."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that the trainer started from. It is known once the trainer is ready."""
        return Checkpoint.of(self.fleet.facts(TRAINER))


def make_workers(config: Config, run_dir: RunDir) -> Workers:
    """Make the worker processes of a run, ready to be started."""
    prepare(config.delivery, run_dir.path)
    (run_dir.path / RENDEZVOUS).unlink(missing_ok=True)
    trainers = [("trainer", rank) for rank in range(config.training.ranks)]
    engines = [("engine", rank) for rank in range(config.engine.processes)]
    # Trainer ranks depend on each other: if one of several dies, the run ends and is resumed as a whole.
    restarted = engines if len(trainers) > 1 else [*trainers, *engines]
    sweep_daemons()
    mps, no_mps = start_mps(config)
    events = Events()
    fleet = Fleet(
        make_launcher(config, environment_of_workers(mps, no_mps)),
        run_dir.path,
        [*trainers, *engines],
        events,
        {f"{role}-{rank}": config.pipeline.restarts for role, rank in restarted},
    )
    stall = config.pipeline.stall_seconds
    others = [f"{role}-{rank}" for role, rank in trainers[1:]]
    return Workers(
        fleet=fleet,
        engines={
            name: RemoteEngine(fleet.hub, name, load_deadline=config.delivery.deadline, token_deadline=stall)
            for name in (f"{role}-{rank}" for role, rank in engines)
        },
        trainer=RemoteTrainer(fleet.hub, TRAINER, deadline=max(stall, config.delivery.deadline), others=others),
        events=events,
        mps=mps,
        no_mps=no_mps,
    )


def assemble_with_workers(
    config: Config,
    workers: Workers,
    run_dir: RunDir,
    progress: Progress,
    *,
    task: ReadyTask,
    chat: ModelChatFormat,
    waits: Waits,
    make_journal: Callable[..., Journal] = Journal,
) -> tuple[Controller, Gateway | None]:
    """Make the controller of a run whose workers are ready, and its gateway if the configuration asks for one."""
    checkpoint, clock = workers.checkpoint, RunClock.now()
    journal = make_journal(run_dir.journal, keep_rollouts=config.observe.keep_rollouts)
    before = journal.recover(
        step=checkpoint.step,
        publish_every=config.delivery.publish_every,
        policy=config.policy_name,
        outcomes=config.rollouts.curriculum,
    )
    pool = EnginePool(list(workers.engines.values()))
    gateway = make_gateway(config, task.task, chat, pool, run_dir, progress)
    workers.events.clear()
    controller = assemble(
        config,
        task=task.task,
        chat=chat,
        pool=pool,
        trainer=workers.trainer,
        outputs=Outputs(
            journal,
            MetricsLog(run_dir.metrics, trackers=make_trackers(config, progress.note)),
            progress,
            clock,
            Timeline(run_dir.timeline, clock) if config.observe.timeline else None,
        ),
        before=before,
        checkpoint=checkpoint,
        waits=waits,
        events=workers.events,
        processes=workers.fleet,
        remote=workers.engines,
        scoring=task.scoring,
        agents=gateway if isinstance(task.task, AgentTask) else None,
    )
    journal.meta("name", config.run.name)
    journal.meta("started", clock.wall)
    journal.meta("outcome", "running")
    journal.meta("lag_bound", controller.window.lag_bound)
    journal.meta("no_mps", workers.no_mps or None)
    return controller, gateway


def make_gateway(
    config: Config, task: Task, chat: ModelChatFormat, pool: EnginePool, run_dir: RunDir, progress: Progress
) -> Gateway | None:
    """Make the gateway if the configuration asks for one."""
    agents = isinstance(task, AgentTask)
    if not agents and not config.gateway.serve:
        return None
    # The gateway's HTTP library is loaded only when it is used.
    from headrace.gateway.gateway import KEY_VARIABLE, Gateway

    positions = model_facts(Path(config.model.path), config.model.weights).max_positions or LONGEST_DEFAULT
    return Gateway(
        pool,
        chat,
        model=Path(config.model.path).name,
        bind=config.gateway.bind,
        port=config.gateway.port,
        key=os.environ.get(KEY_VARIABLE),
        max_length=min(config.engine.max_length or LONGEST_DEFAULT, positions),
        max_tokens=config.rollouts.max_tokens,
        max_turns=config.rollouts.max_turns,
        stop_token_ids=tuple(chat.token_id(token) for token in config.rollouts.stop),
        agents=task.agents if isinstance(task, AgentTask) else None,
        session_seconds=task.timeout if isinstance(task, AgentTask) else config.pipeline.stall_seconds,
        file=run_dir.path / "gateway.json",
        note=progress.note,
    )

"""This module assembles a run with worker processes: the workers, the controller and the gateway.

On the controller's side, only this file and `inputs` know concrete classes; on the workers' side, only
`cluster.worker_main`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headrace.buffer.journal import Journal
from headrace.channel.events import Events
from headrace.cluster.launchers.local import make_launcher
from headrace.cluster.mps import Mps, sweep_daemons
from headrace.cluster.supervision import Fleet
from headrace.config import Config
from headrace.config.memory import LONGEST_DEFAULT
from headrace.config.model_dir import model_facts
from headrace.delivery.setup import prepare
from headrace.engines.pool import EnginePool
from headrace.engines.serving import RemoteEngine
from headrace.gateway.agents import AgentTask
from headrace.observe.metrics import MetricsLog, Trackers
from headrace.observe.progress import Progress
from headrace.observe.spans import RunClock, Timeline
from headrace.pipeline.controller import Controller
from headrace.pipeline.inputs import ReadyTask
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Outputs
from headrace.pipeline.waits import Waits
from headrace.run_dir import RunDir
from headrace.tasks.base import Task
from headrace.tasks.chat import ChatFormat
from headrace.training.base import Checkpoint
from headrace.training.remote import RENDEZVOUS, RemoteTrainer

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway

TRAINER = "trainer-0"


class Workers:
    """The worker processes of a run, ready to be started, and the handles to talk to them."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        prepare(config.delivery, run_dir.path)
        (run_dir.path / RENDEZVOUS).unlink(missing_ok=True)
        trainers = [("trainer", rank) for rank in range(config.training.ranks)]
        engines = [("engine", rank) for rank in range(config.engine.processes)]
        # Trainer ranks depend on each other: if one of several dies, the run ends and is resumed as a whole.
        restarted = engines if len(trainers) > 1 else [*trainers, *engines]
        sweep_daemons()
        self.mps = Mps(config)
        self.events = Events()
        self.fleet = Fleet(
            make_launcher(config, self.mps.environment),
            run_dir.path,
            [*trainers, *engines],
            self.events,
            {f"{role}-{rank}": config.pipeline.restarts for role, rank in restarted},
        )
        stall, deadline = config.pipeline.stall_seconds, config.delivery.deadline
        self.engines = {
            name: RemoteEngine(self.fleet.hub, name, load_deadline=deadline, token_deadline=stall)
            for name in (f"{role}-{rank}" for role, rank in engines)
        }
        others = [f"{role}-{rank}" for role, rank in trainers[1:]]
        self.trainer = RemoteTrainer(self.fleet.hub, TRAINER, deadline=max(stall, deadline), others=others)


def assemble_with_workers(
    config: Config,
    workers: Workers,
    run_dir: RunDir,
    progress: Progress,
    *,
    task: ReadyTask,
    chat: ChatFormat,
    waits: Waits,
    make_journal: Callable[..., Journal] = Journal,
) -> tuple[Controller, Gateway | None]:
    """Make the controller of a run whose workers are ready, and its gateway if the configuration asks for one."""
    checkpoint, clock = Checkpoint.of(workers.fleet.facts(TRAINER)), RunClock.now()
    journal = make_journal(run_dir.journal, keep_rollouts=config.observe.keep_rollouts)
    before = journal.recover(
        step=checkpoint.step,
        publish_every=config.delivery.publish_every,
        policy=config.policy_name,
        outcomes=config.rollouts.curriculum,
    )
    trackers = None
    if config.observe.trackers:
        trackers = Trackers(config.observe.trackers, config.run.name, msgspec.to_builtins(config), progress.note)
    pool = EnginePool(list(workers.engines.values()))
    gateway = make_gateway(config, task.task, chat, pool, run_dir, progress)
    workers.events.clear()
    parts = Parts(
        config,
        task=task.task,
        chat=chat,
        pool=pool,
        trainer=workers.trainer,
        outputs=Outputs(
            journal,
            MetricsLog(run_dir.metrics, trackers=trackers),
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
        agents=gateway.episode if gateway is not None and isinstance(task.task, AgentTask) else None,
    )
    journal.meta("name", config.run.name)
    journal.meta("started", clock.wall)
    journal.meta("outcome", "running")
    journal.meta("lag_bound", parts.window.lag_bound)
    journal.meta("no_mps", workers.mps.missing or None)
    return Controller(parts), gateway


def make_gateway(
    config: Config, task: Task, chat: ChatFormat, pool: EnginePool, run_dir: RunDir, progress: Progress
) -> Gateway | None:
    """Make the gateway if the configuration asks for one."""
    own = task if isinstance(task, AgentTask) else None
    if own is None and not config.gateway.serve:
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
        agents=None if own is None else own.agents,
        session_seconds=config.pipeline.stall_seconds if own is None else own.timeout,
        file=run_dir.path / "gateway.json",
        note=progress.note,
    )

"""Concrete classes meet here and nowhere else: from a configuration to the parts of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.buffer.journal import Journal
from headrace.buffer.window import Window
from headrace.channel.codec import Message
from headrace.cluster.launchers.choice import make_launcher
from headrace.cluster.mps import Mps, environment_of_workers, start_mps, sweep_daemons
from headrace.cluster.supervision import Fleet
from headrace.config import Config
from headrace.config.model_dir import model_facts
from headrace.delivery.setup import prepare
from headrace.delivery.transports.segments import sweep
from headrace.engines.messages import Deltas
from headrace.engines.pool import EnginePool
from headrace.engines.remote import RemoteEngine
from headrace.errors import PeerDied
from headrace.gateway.task import AgentTask
from headrace.observe.clock import RunClock
from headrace.observe.metrics import MetricsLog
from headrace.observe.progress import Progress
from headrace.observe.timeline import Timeline
from headrace.pipeline.controller import Controller
from headrace.pipeline.engine_watch import EngineWatch
from headrace.pipeline.extensions import make_trackers
from headrace.pipeline.inputs import ReadyTask
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Recorder
from headrace.pipeline.taking_up import take_up
from headrace.pipeline.waits import Waits
from headrace.run_dir import RunDir
from headrace.tasks.chat import ChatFormat
from headrace.tasks.source import PromptSource
from headrace.training.messages import RENDEZVOUS, Published, Saved
from headrace.training.remote import RemoteTrainer

if TYPE_CHECKING:
    from headrace.gateway.gateway import Gateway

TRAINER = "trainer-0"
LONGEST_DEFAULT = 4096
"""The longest sequence of an engine without `[engine] max_length`."""


@dataclass
class Wired:
    """A run whose processes can be started."""

    config: Config
    fleet: Fleet
    task: ReadyTask
    chat: ChatFormat
    engines: dict[str, RemoteEngine]
    trainer: RemoteTrainer
    waits: Waits
    watch: EngineWatch = field(default_factory=EngineWatch)
    trainer_device: str = "cpu"
    gateway: Gateway | None = None
    mps: Mps | None = None
    no_mps: str = ""
    """Why there is no daemon, where one was asked for."""

    @property
    def takes_turns(self) -> bool:
        """Whether a GPU that trainer and engines share is each one's in turn."""
        return self.config.pipeline.one_gpu == "turns" or bool(self.no_mps)


def wire(config: Config, run_dir: RunDir, task: ReadyTask, chat: ChatFormat) -> Wired:
    """The processes of a run and the lines to them."""
    prepare(config.delivery, run_dir.path)
    (run_dir.path / RENDEZVOUS).unlink(missing_ok=True)
    trainers = [("trainer", rank) for rank in range(config.training.ranks)]
    workers = [*trainers, *(("engine", rank) for rank in range(config.engine.processes))]
    sweep_daemons()
    mps, no_mps = start_mps(config)
    fleet = Fleet(make_launcher(config, environment_of_workers(mps, no_mps)), run_dir.path, workers)
    stall = config.pipeline.stall_seconds
    engines = {
        name: RemoteEngine(fleet.hub, name, load_deadline=config.delivery.deadline, token_deadline=stall)
        for name in fleet.names
        if name.startswith("engine-")
    }
    others = [name for name in fleet.names if name.startswith("trainer-") and name != TRAINER]
    trainer = RemoteTrainer(fleet.hub, TRAINER, deadline=max(stall, config.delivery.deadline), others=others)
    return Wired(
        config=config,
        fleet=fleet,
        task=task,
        chat=chat,
        engines=engines,
        trainer=trainer,
        waits=Waits(),
        mps=mps,
        no_mps=no_mps,
    )


def make_controller(
    wired: Wired, run_dir: RunDir, progress: Progress, make_journal: Callable[..., Journal] = Journal
) -> Controller:
    """The controller, once the trainer is ready and has said how far its checkpoint reaches."""
    config = wired.config
    facts = wired.fleet.facts(TRAINER)
    checkpoint_step = int(facts["policy_steps"])
    wired.trainer_device = str(facts["device"])
    clock = RunClock.now()
    journal = make_journal(run_dir.journal, keep_rollouts=config.observe.keep_rollouts)
    before = journal.recover(
        step=checkpoint_step, publish_every=config.delivery.publish_every, outcomes=config.rollouts.curriculum
    )
    first_step = before.reach
    # A checkpoint may be ahead of what a dying run could still write down.
    first_version = max(before.last_version, int(facts["version"])) + 1
    window = Window(
        config.buffer.groups,
        config.buffer.depth,
        config.delivery.publish_every,
        config.buffer.max_lag,
        first_version=first_version,
        versions=config.run.versions - first_step // config.delivery.publish_every,
        on_stale=config.buffer.on_stale,
        oversample=config.buffer.oversample,
        republished=before.republished,
    )
    journal.meta("name", config.run.name)
    journal.meta("started", clock.wall)
    journal.meta("outcome", "running")
    journal.meta("lag_bound", window.lag_bound)
    journal.meta("no_mps", wired.no_mps or None)
    recorder = Recorder(
        journal,
        MetricsLog(run_dir.metrics, trackers=make_trackers(config, progress.note)),
        Timeline(run_dir.timeline, clock) if config.observe.timeline else None,
        progress,
        window,
        clock=clock,
        versions_total=config.run.versions,
        versions_done=first_step // config.delivery.publish_every,
        before=before,
        record=config.pipeline.record,
    )
    left = take_up(before, window, recorder, journal, wired.task.task, checkpoint_step)
    source = PromptSource(wired.task.task.train, config.run.seed, curriculum=config.rollouts.curriculum)
    source.seek(before.drawn)
    source.restore(before.outcomes)
    pool = EnginePool(list(wired.engines.values()))
    wired.gateway = make_gateway(wired, pool, run_dir, progress)
    parts = Parts(
        config=config,
        task=wired.task.task,
        chat=wired.chat,
        source=source,
        pool=pool,
        trainer=wired.trainer,
        window=window,
        recorder=recorder,
        waits=wired.waits,
        scoring=wired.task.scoring,
        end_engine=wired.fleet.kill,
        agents=wired.gateway if isinstance(wired.task.task, AgentTask) else None,
        first_step=first_step,
        checkpoint_step=checkpoint_step,
        left=left,
        resumed=bool(facts["resumed_from"]),
        parent_version=int(facts["version"]),
    )
    controller = Controller(parts)
    _connect(wired, controller, run_dir)
    return controller


def make_gateway(wired: Wired, pool: EnginePool, run_dir: RunDir, progress: Progress) -> Gateway | None:
    """The gateway, where the configuration asks for one."""
    config, task = wired.config, wired.task.task
    agents = isinstance(task, AgentTask)
    if not agents and not config.gateway.serve:
        return None
    # Its HTTP library is loaded where it is used only.
    from headrace.gateway.gateway import KEY_VARIABLE, Gateway

    positions = model_facts(Path(config.model.path), config.model.weights).max_positions or LONGEST_DEFAULT
    return Gateway(
        pool,
        wired.chat,
        model=Path(config.model.path).name,
        bind=config.gateway.bind,
        port=config.gateway.port,
        key=os.environ.get(KEY_VARIABLE),
        max_length=min(config.engine.max_length or LONGEST_DEFAULT, positions),
        max_tokens=config.rollouts.max_tokens,
        max_turns=config.rollouts.max_turns,
        stop_token_ids=tuple(wired.chat.token_id(token) for token in config.rollouts.stop),
        agents=task.agents if isinstance(task, AgentTask) else None,
        session_seconds=task.timeout if isinstance(task, AgentTask) else config.pipeline.stall_seconds,
        file=run_dir.path / "gateway.json",
        note=progress.note,
    )


def _connect(wired: Wired, controller: Controller, run_dir: RunDir) -> None:
    recorder, watch = controller.recorder, wired.watch

    def on_message(peer: str, message: Message) -> None:
        match message:
            case Deltas():
                wired.engines[peer].deliver(message)
                watch.progress(peer)
                wired.waits.moved()
            case Published():
                controller.published(message)
            case Saved(version=version, path=path):
                recorder.saved(version, Path(path))

    def on_death(death: PeerDied) -> None:
        if death.peer in wired.engines:
            # In this order: the pool then knows that what fails now was lost, and is to be resumed elsewhere.
            controller.parts.pool.lose(death.peer, death.reason)
            wired.engines[death.peer].lost(str(death))
            recorder.restarted(death.peer, death.reason)
            watch.forget(death.peer)
        if death.peer == TRAINER:
            (run_dir.path / RENDEZVOUS).unlink(missing_ok=True)
            controller.comeback.lost()
        recorder.note(f"{death}; it is started again" if death.peer in wired.fleet.restarts else str(death))

    async def on_return(peer: str) -> None:
        recorder.note(f"{peer} is back")
        if peer == TRAINER:
            sweep()  # What the dead one left: engines that still wanted it had all the time until now.
            facts = wired.fleet.facts(TRAINER)
            step = int(facts["policy_steps"]) if facts["resumed_from"] else None
            await controller.comeback.returned(step, int(facts["version"]))
            return
        wired.engines[peer].back()
        controller.parts.pool.take_back(peer)
        wired.waits.moved()

    # Ranks of a trainer hold one another up: where one of several dies the run ends, and is resumed as a whole.
    revived = [TRAINER] if wired.config.training.ranks == 1 else []
    wired.fleet.restarts = dict.fromkeys([*revived, *wired.engines], wired.config.pipeline.restarts)
    wired.fleet.on_return = on_return
    wired.fleet.on_message = on_message
    wired.fleet.on_beat = recorder.beat
    wired.fleet.on_death = on_death

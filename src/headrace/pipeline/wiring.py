"""Concrete classes meet here and nowhere else: from a configuration to the parts of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.buffer.journal import Journal
from headrace.buffer.window import Window
from headrace.channel.codec import Message
from headrace.config import Config
from headrace.delivery.setup import prepare
from headrace.engines.messages import Deltas
from headrace.engines.pool import EnginePool
from headrace.engines.remote import RemoteEngine
from headrace.errors import PeerDied
from headrace.observe.clock import RunClock
from headrace.observe.metrics import MetricsLog
from headrace.observe.progress import Progress
from headrace.observe.timeline import Timeline
from headrace.pipeline.controller import Controller
from headrace.pipeline.inputs import ReadyTask
from headrace.pipeline.launchers.local import LocalLauncher
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Recorder
from headrace.pipeline.run_dir import RunDir
from headrace.pipeline.supervision import Fleet
from headrace.pipeline.waits import Waits
from headrace.tasks.chat import ChatFormat
from headrace.tasks.source import PromptSource
from headrace.training.messages import Published, Saved
from headrace.training.remote import RemoteTrainer

TRAINER = "trainer-0"


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


def wire(config: Config, run_dir: RunDir, task: ReadyTask, chat: ChatFormat) -> Wired:
    """The processes of a run and the lines to them."""
    prepare(config.delivery, run_dir.path)
    workers = [("trainer", 0), *(("engine", rank) for rank in range(config.engine.count))]
    fleet = Fleet(LocalLauncher(), run_dir.path, workers)
    stall = config.pipeline.stall_seconds
    engines = {
        name: RemoteEngine(fleet.hub, name, load_deadline=config.delivery.deadline, token_deadline=stall)
        for name in fleet.names
        if name.startswith("engine-")
    }
    trainer = RemoteTrainer(fleet.hub, TRAINER, deadline=max(stall, config.delivery.deadline))
    return Wired(config=config, fleet=fleet, task=task, chat=chat, engines=engines, trainer=trainer, waits=Waits())


def make_controller(wired: Wired, run_dir: RunDir, progress: Progress) -> Controller:
    """The controller, once the trainer is ready and has said how far its checkpoint reaches."""
    config = wired.config
    facts = wired.fleet.facts(TRAINER)
    first_step = int(facts["policy_steps"])
    clock = RunClock.now()
    journal = Journal(run_dir.journal, keep_rollouts=config.observe.keep_rollouts)
    before = journal.recover(step=first_step)
    first_version = before.last_version + 1
    window = Window(
        config.buffer.groups,
        config.buffer.depth,
        config.delivery.publish_every,
        config.buffer.max_lag,
        first_version=first_version,
        versions=config.run.versions - first_step // config.delivery.publish_every,
    )
    journal.meta("name", config.run.name)
    journal.meta("started", clock.wall)
    journal.meta("outcome", "running")
    journal.meta("lag_bound", window.lag_bound)
    recorder = Recorder(
        journal,
        MetricsLog(run_dir.metrics),
        Timeline(run_dir.timeline, clock) if config.observe.timeline else None,
        progress,
        window,
        clock=clock,
        versions_total=config.run.versions,
        versions_done=first_step // config.delivery.publish_every,
        before=before,
    )
    source = PromptSource(wired.task.task.train, config.run.seed)
    source.seek(before.next_group)
    parts = Parts(
        config=config,
        task=wired.task.task,
        chat=wired.chat,
        source=source,
        pool=EnginePool(list(wired.engines.values())),
        trainer=wired.trainer,
        window=window,
        recorder=recorder,
        waits=wired.waits,
        first_step=first_step,
        resumed=bool(facts["resumed_from"]),
        parent_version=int(facts["version"]),
    )
    controller = Controller(parts)
    _connect(wired, controller)
    return controller


def _connect(wired: Wired, controller: Controller) -> None:
    recorder = controller.recorder

    def on_message(peer: str, message: Message) -> None:
        match message:
            case Deltas():
                wired.engines[peer].deliver(message)
                wired.waits.moved()
            case Published():
                controller.published(message)
            case Saved(version=version, path=path):
                recorder.saved(version, Path(path))

    def on_death(death: PeerDied) -> None:
        if death.peer in wired.engines:
            wired.engines[death.peer].lost(str(death))

    wired.fleet.on_message = on_message
    wired.fleet.on_beat = recorder.beat
    wired.fleet.on_death = on_death

"""This module starts or resumes a run, and runs it to its summary. The command line and the Python API both call it.

A run ends in order, or with one line that says why it failed. However it ends, no process and no shared-memory segment
stays behind, the journal is closed with its ledgers balanced, and `summary.json` and `report.html` are written from the
journal.

Only this file, `inputs` and, on the workers' side, `cluster.worker_main` know concrete classes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headrace.buffer.journal import Journal
from headrace.buffer.reader import open_readonly
from headrace.buffer.store import check_resumable, lock_run
from headrace.channel.events import Events
from headrace.channel.files import FilesComplete, write_folder
from headrace.channel.heartbeats import Welcome
from headrace.channel.hub import Hub
from headrace.channel.worker_side import sweep_marked
from headrace.cluster.inventory import chosen_hosts, place_run
from headrace.cluster.launchers.local import hosts_of, make_launcher
from headrace.cluster.mps import Mps, sweep_daemons
from headrace.cluster.placement import Host, Place, one_more
from headrace.cluster.supervision import STOP_SECONDS, Fleet, SeveralHosts
from headrace.config import AgentTaskConfig, Config, MixtureConfig, dump_config, load_config, with_settings
from headrace.config.hub import model_dir, pinned
from headrace.config.memory import longest_sequence
from headrace.config.model_dir import ModelFacts, model_facts
from headrace.config.remarks import remarks
from headrace.config.schema import PROCESSES
from headrace.delivery.setup import choose, clean, prepare
from headrace.delivery.transports.tcp_wire import KEYS
from headrace.engines.pool import EnginePool
from headrace.engines.serving import RemoteEngine
from headrace.engines.vllm.building import check_hosts
from headrace.errors import DeadlineError, DiskError, HeadraceError, RunFinished, UserError
from headrace.gateway.agents import AgentTask
from headrace.gateway.episode import AgentEpisode
from headrace.gateway.relay import KEY_VARIABLE, Relay, checked_key
from headrace.gateway.session import new_key
from headrace.observe.metrics import MetricsLog, read_metrics, reported_step
from headrace.observe.progress import Progress
from headrace.observe.prometheus import Gauges, parse_address, serve_gauges
from headrace.observe.records import ENGINES, STRETCHES
from headrace.observe.spans import RunClock, Timeline, timeline_damage
from headrace.observe.trackers.feed import Trackers
from headrace.pipeline.commands import command_socket
from headrace.pipeline.controller import Controller
from headrace.pipeline.inputs import NOTHING, Given, ReadyTask, check_inputs
from headrace.pipeline.parts import Parts
from headrace.pipeline.recording import Outputs
from headrace.pipeline.trial import check_models
from headrace.pipeline.waits import Status, Waits, scorer_waits
from headrace.review.summary import write_report, write_summary
from headrace.run_dir import RunDir, set_aside, with_name, write_whole
from headrace.tasks.chat import ChatFormat
from headrace.training.base import Checkpoint
from headrace.training.checkpoints.remote_store import check_store
from headrace.training.remote import RENDEZVOUS, RemoteTrainer
from headrace.types import NO_VERSION

TRAINER = "trainer-0"
GATEWAY = "gateway-0"
SHOW_SECONDS = 0.25
WATCH_SECONDS = 1.0
ENGINE_KEYS = re.compile(r"\bengine\.(count|gpus|urls)\b")
"""The settings of a resume that say which engines there are, whatever the run was scaled to."""


class Workers:
    """The worker processes of a run, ready to be started, and the handles to talk to them.

    While the run is live, it starts and ends single engines (`elastic.Crew`).
    """

    def __init__(
        self, config: Config, run_dir: RunDir, hosts: Sequence[Host], ranks: Sequence[int] | None = None
    ) -> None:
        """`ranks` are those of the engines that are started; by default as many as the configuration says."""
        _, placement = place_run(config, hosts)
        self._config = config
        self._run_dir = run_dir
        self._hosts = chosen_hosts(config, hosts)
        self.ranks = list(range(config.engine.at_start)) if ranks is None else list(ranks)
        self.urls = list(config.engine.urls)
        self._places = {place.name: place for place in placement.places}
        """Worker -> its place. An engine that is not started yet, or has left, keeps its own."""
        try:
            for rank in self.ranks:
                self.place(rank)
        except UserError as error:
            raise UserError(
                f"{error}: the run was scaled to {len(self.ranks)} engines; give it another number with --set "
                "engine.count=N"
            ) from error
        prepare(config.delivery, run_dir.path)
        (run_dir.path / RENDEZVOUS).unlink(missing_ok=True)
        trainers, engines = placement.of("trainer"), [self._places[f"engine-{rank}"] for rank in self.ranks]
        gateways = []
        if isinstance(config.task, AgentTaskConfig) or config.gateway.serve:
            gateways = [Place(role="gateway", rank=0, host=hosts[0].name, address=hosts[0].address)]
        others = [*gateways, *placement.of("scorer")]
        # Trainer ranks depend on each other: if one of several dies, the run ends and is resumed as a whole.
        restarted = [*([] if len(trainers) > 1 else trainers), *engines, *others]
        sweep_daemons()
        sweep_marked()
        self.mps = Mps(config)
        self.events = Events()
        self.fleet = Fleet(
            make_launcher(config, self.mps.environment),
            run_dir.path,
            [*trainers, *engines, *others],
            self.events,
            {place.name: config.pipeline.restarts for place in restarted},
            _several_hosts(config, run_dir, hosts) if hosts[0].address else None,
        )
        stall, deadline = config.pipeline.stall_seconds, config.delivery.deadline
        self.engines = {place.name: self._handle(place.name) for place in engines}
        self.beside_trainer = [place.name for place in placement.of("engine") if TRAINER in place.neighbours]
        """The engines that share their GPU with the trainer."""
        longest = max(stall, deadline + config.evaluate.longest_hold)
        away = trainers[0].host != hosts[0].name and not config.training.checkpoint_directory
        self.trainer = RemoteTrainer(
            self.fleet.hub,
            TRAINER,
            deadline=longest,
            others=[place.name for place in trainers[1:]],
            checkpoints=run_dir.checkpoints if away else None,
            keep=config.training.keep_checkpoints,
        )

    def _handle(self, name: str) -> RemoteEngine:
        stall, deadline = self._config.pipeline.stall_seconds, self._config.delivery.deadline
        return RemoteEngine(self.fleet.hub, name, load_deadline=deadline, token_deadline=stall)

    def place(self, rank: int) -> None:
        """See `Crew.place`."""
        if f"engine-{rank}" not in self._places:
            found = one_more(self._config, rank, list(self._places.values()), self._hosts)
            self._places[found.name] = found

    def add_url(self, url: str) -> int:
        """See `Crew.add_url`. Workers read the URL of their server from the configuration of the run."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--add {url}: it is not a URL such as http://127.0.0.1:8000")
        # Every worker that starts checks all of them, so a server out of reach must not come among them.
        check_hosts([url], choose(self._config.delivery).transport)
        if url not in self.urls:
            engine = msgspec.structs.replace(self._config.engine, urls=[*self.urls, url])
            self._config = msgspec.structs.replace(self._config, engine=engine)
            write_whole(self._run_dir.config, dump_config(self._config).encode(), durable=True)
            self.urls.append(url)
        rank = self.urls.index(url)
        self.place(rank)
        return rank

    async def start(self, rank: int) -> RemoteEngine:
        """See `Crew.start`."""
        name = f"engine-{rank}"
        await self.fleet.add(self._places[name], self._config.pipeline.restarts)
        return self._handle(name)

    async def end(self, rank: int) -> None:
        """See `Crew.end`."""
        await self.fleet.remove(f"engine-{rank}")


def _several_hosts(config: Config, run_dir: RunDir, hosts: Sequence[Host]) -> SeveralHosts:
    token = secrets.token_hex(8)

    async def welcome(hub: Hub, name: str) -> None:
        present = (run_dir.next_config, run_dir.config, run_dir.path / KEYS)
        last_step, checkpoints = None, name == TRAINER and not config.training.checkpoint_directory
        if name.startswith("trainer") and run_dir.journal.is_file():
            with open_readonly(run_dir.journal) as journal:
                last_step = journal.last_step(config.policy_name)
        await hub.send(
            name,
            Welcome(
                run=run_dir.path.name,
                token=token,
                files={path.name: path.read_bytes() for path in present if path.is_file()},
                silence_seconds=config.cluster.silence_seconds,
                last_step=last_step,
                checkpoints=checkpoints,
            ),
        )
        if checkpoints:
            kept = sorted(run_dir.checkpoints.glob("step-*"))[-1:] + sorted(run_dir.checkpoints.glob("base*"))
            for folder in kept:
                await write_folder(hub, name, folder, config.delivery.deadline)
            await hub.send(name, FilesComplete())

    return SeveralHosts(
        hosts=hosts,
        address=config.cluster.address or hosts[0].address,
        silence=config.cluster.silence_seconds,
        welcome=welcome,
    )


class RunSession:
    """A run in this process. `execute` may be called once."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        progress: Progress,
        task: ReadyTask,
        chat: ChatFormat,
        *,
        journal: Callable[..., Journal] = Journal,
        tokenizer_known: bool = False,
        ranks: Sequence[int] | None = None,
        hub_names: Mapping[str, str] | None = None,
        stretches: Sequence[Sequence[float]] = (),
    ) -> None:
        """`journal` differs from the default only where the journal itself is measured.

        `tokenizer_known` says that the journal has the digest of the tokenizer that the run began with. `ranks` are
        those of the engines to begin with, if the run was scaled before. `hub_names` are the models and datasets of
        a new run that come from the hub, with their commits, by the key that names them. `stretches` are the times in
        which previous processes trained.
        """
        self.config = config
        self.run_dir = run_dir
        self.progress = progress
        self._task = task
        self._chat = chat
        self._journal = journal
        self._tokenizer_known = tokenizer_known
        self._ranks = ranks
        self._hub_names = hub_names
        self._stretches = stretches
        self._hosts = hosts_of(config)
        self._controller: Controller | None = None
        self._gateway: Relay | None = None
        self._gauges: Gauges | None = None
        self._status_failed = False
        self._interrupt: Callable[[], object] | None = None
        self._interrupted = False
        self.listener: Callable[[dict[str, Any]], None] | None = None
        """Is called with every record of `metrics.jsonl`, in the thread of the run. Must return at once."""
        self.outcome = "failed"
        """How the run ended: `finished`, `interrupted` or `failed`."""
        self.summary: dict[str, Any] = {}
        """The figures of the run, as in `summary.json`; empty before its end."""

    @property
    def began(self) -> bool:
        """Whether a version was served. From then on the run can be resumed."""
        return self._controller is not None and self._controller.versions.proved != NO_VERSION

    @property
    def started(self) -> bool:
        """Whether all processes were ready, so that the run has something to go on from."""
        return self._controller is not None

    def interrupt(self) -> None:
        """End the run in order; if it is starting, or ends already, at once. Any thread may call this."""
        self._interrupted = True
        if self._interrupt is not None:
            self._interrupt()

    def execute(self) -> RunSession:
        """Run to the end. Raises the `HeadraceError` that ended the run otherwise."""
        try:
            asyncio.run(self._execute())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        return self

    async def _execute(self) -> None:
        self.progress.start()
        for remark in remarks(self.config, self._facts):
            self.progress.note(remark)
        workers: Workers | None = None
        try:
            workers = Workers(self.config, self.run_dir, self._hosts, self._ranks)
            if workers.mps.missing:
                said = f'[pipeline] one_gpu = "mps": {workers.mps.missing}'
                self.progress.note(f"{said}; trainer and engines take turns instead")
            with self._interruptible():
                await self._supervised(workers)
        except BaseExceptionGroup as failures:
            raise first_cause(failures) from None
        finally:
            if workers is not None:
                if self._gateway is not None:
                    self._gateway.close()
                # Before the run has begun, no process has anything to finish: Ctrl-C then ends them at once.
                await asyncio.gather(workers.fleet.stop(STOP_SECONDS if self.started else 0.0), self._close_task())
                await asyncio.to_thread(workers.mps.stop)
            clean(self.config.delivery, self.run_dir.path)
            self.run_dir.status.unlink(missing_ok=True)
            try:
                if self._controller is not None:
                    recorder = self._controller.recorder
                    recorder.abandon("interrupted" if self.outcome == "interrupted" else "run failed")
                    recorder.close(self.outcome)
                    if self.run_dir.journal.is_file():
                        self.summary = write_summary(self.run_dir.path)
                        write_report(self.run_dir.path)
            finally:
                self.progress.stop()

    async def _close_task(self) -> None:
        try:
            await self._task.close()
        except DeadlineError as error:
            self.progress.note(f"{error}; the run ends without it")

    async def _supervised(self, workers: Workers) -> None:
        fleet, waits = workers.fleet, Waits()
        async with asyncio.TaskGroup() as guard:
            watchers = [guard.create_task(fleet.watch(), name="watch processes")]
            await self._task.start()
            await fleet.start(self.config.pipeline.start_seconds)
            # Starting may take longer than `stall_seconds`.
            waits.moved()
            facts = fleet.facts(TRAINER)
            self.progress.note(f"weights travel by {facts['transport']} ({facts['transport_why']})")
            for name in workers.engines:
                if method := fleet.facts(name).get("quantization"):
                    self.progress.note(f"{name} quantises its weights ({method}); only the canary checks the result")
                if (staging := fleet.facts(name).get("staging", "device")) != "device":
                    self.progress.note(f"{name} stages new weights: {staging} ({fleet.facts(name)['staging_why']})")
            controller = self._assemble(workers, waits)
            for line in Checkpoint.of(facts).notes:
                self.progress.note(line)
            self._controller = controller
            watchers.append(guard.create_task(controller.serve(), name="serve"))
            if self._gateway is not None:
                watchers.append(guard.create_task(self._gateway.run(), name="gateway"))
                await self._gateway.start()
            self.run_dir.keep_config()
            watchers.append(guard.create_task(self._show_loop(controller), name="show"))
            watchers.append(guard.create_task(self._watch_loop(workers, controller), name="watch stalls"))
            commands = command_socket(fleet.sockets / "cmd", self.run_dir.control, controller.scaling.ask)
            async with commands, self._served_numbers():
                await controller.begin()
                await controller.train()
                await controller.finish()
            self.outcome = "interrupted" if controller.stopping else "finished"
            for watcher in watchers:
                watcher.cancel()

    def _assemble(self, workers: Workers, waits: Waits) -> Controller:
        config, run_dir, task = self.config, self.run_dir, self._task.task
        checkpoint, clock = Checkpoint.of(workers.fleet.facts(TRAINER)), RunClock.now()
        journal = self._journal(run_dir.journal, keep_rollouts=config.observe.keep_rollouts)
        # Older releases recorded no temperatures. Their tokens have that of the configuration before this resume.
        journal.meta("temperature", load_config(run_dir.config).rollouts.temperature, once=True)
        before = journal.recover(
            step=checkpoint.step,
            publish_every=config.delivery.publish_every,
            policy=config.policy_name,
            outcomes=config.rollouts.curriculum,
        )
        for line in before.damage:
            self.progress.note(line)
        trackers = None
        if config.observe.trackers:
            settings = msgspec.to_builtins(config)
            trackers = Trackers(
                config.observe.trackers,
                config.run.name,
                settings,
                self.progress.note,
                options=config.observe.tracker_options,
                folder=run_dir.path / "trackers",
            )
        self._gauges = Gauges(config.run.name) if config.observe.prometheus else None
        metrics = MetricsLog(run_dir.metrics, trackers=trackers, gauges=self._gauges, listener=self.listener)
        known = read_metrics(run_dir.metrics)
        if before.last_version != NO_VERSION:
            metrics.write("resumed", step=before.resume_step)
        pool = EnginePool(list(workers.engines.values()))
        relay = self._gateway = self._make_gateway(workers, pool)
        workers.events.clear()
        self._task.scoring.connect(workers.fleet.hub)
        parts = Parts(
            config,
            task=task,
            chat=self._chat,
            pool=pool,
            trainer=workers.trainer,
            outputs=Outputs(
                journal,
                metrics,
                self.progress,
                clock,
                Timeline(run_dir.timeline, clock) if config.observe.timeline else None,
            ),
            before=before,
            checkpoint=checkpoint,
            waits=waits,
            events=workers.events,
            processes=workers.fleet,
            remote=dict(workers.engines),
            crew=workers,
            scoring=self._task.scoring,
            sets=self._task.sets,
            gateway=relay,
            agents=partial(AgentEpisode, relay=relay) if relay is not None and isinstance(task, AgentTask) else None,
            max_length=self._longest_sequence,
        )
        parts.recorder.remember(known)
        journal.meta("name", config.run.name)
        if isinstance(config.task, MixtureConfig):
            journal.meta("tasks", list(config.task.tasks))
        if not self._tokenizer_known:
            journal.meta("tokenizer", self._chat.digest)
        if self._hub_names:
            journal.meta("hub", dict(self._hub_names))
        journal.meta("started", clock.wall)
        journal.meta("outcome", "running")
        journal.meta(STRETCHES, self._stretches)
        journal.meta("lag_bound", parts.window.lag_bound)
        journal.meta("no_mps", workers.mps.missing or None)
        journal.meta("engine_facts", {name: workers.fleet.facts(name) for name in workers.engines})
        journal.meta(ENGINES, workers.ranks)
        return Controller(parts)

    def _served_numbers(self) -> contextlib.AbstractAsyncContextManager[object]:
        if self._gauges is None:
            return contextlib.nullcontext()
        return serve_gauges(parse_address(self.config.observe.prometheus), self._gauges, self.progress.note)

    def _make_gateway(self, workers: Workers, pool: EnginePool) -> Relay | None:
        config, task = self.config, self._task.task
        own = task if isinstance(task, AgentTask) else None
        if own is None and not config.gateway.serve:
            return None
        key = os.environ.get(KEY_VARIABLE)
        return Relay(
            GATEWAY,
            workers.fleet.hub,
            pool,
            self._chat,
            model=Path(config.model.path).name,
            bind=config.gateway.bind,
            port=config.gateway.port,
            key=checked_key(key) if key else new_key(),
            max_turns=config.rollouts.max_turns,
            session_seconds=config.pipeline.stall_seconds if own is None else own.timeout,
            agents=None if own is None else own.agents,
            file=self.run_dir.path / "gateway.json",
            note=self.progress.note,
        )

    @cached_property
    def _facts(self) -> ModelFacts:
        return model_facts(model_dir(self.config.model), self.config.model.weights)

    @property
    def _longest_sequence(self) -> int:
        return longest_sequence(self.config.engine.max_length, self._facts.max_positions)

    async def _show_loop(self, controller: Controller) -> None:
        while True:
            controller.recorder.show()
            await asyncio.sleep(SHOW_SECONDS)

    async def _watch_loop(self, workers: Workers, controller: Controller) -> None:
        watch, fleet, limit = controller.watch, workers.fleet, self.config.pipeline.stall_seconds
        questions = controller.parts.scoring.questions
        turns = self.config.pipeline.one_gpu == "turns" or bool(workers.mps.missing)
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if fleet.restarting or questions.within_limits:
                controller.waits.moved()  # Restarts, and questions to scorers, have limits of their own.
            if turns and fleet.phases.get(TRAINER) == "stepping":
                # These may be waiting for their turn on the GPU, so that their silence is no fault.
                for name in workers.beside_trainer:
                    watch.forget(name)
            for name in watch.stuck(controller.parts.pool.running, limit / 2):
                self.progress.note(f"{name} has requests and sent no token for {limit / 2:g} s: it is ended")
                watch.forget(name)
                fleet.kill(name)
            if (gateway := self._gateway) is not None and gateway.silent_for() > limit / 2:
                self.progress.note(f"{gateway.name} has not answered for {limit / 2:g} s: it is ended")
                gateway.lost("it did not answer")
                fleet.kill(gateway.name)
            for scorer in controller.parts.scoring.processes.values():
                if scorer.hangs:
                    self.progress.note(f"{scorer.name} has answered no question in time: it is ended")
                    scorer.lost("it did not answer")
                    fleet.kill(scorer.name)
            if not self.run_dir.journal.is_file():
                raise UserError(f"{self.run_dir.path}, the directory of the run, is gone: the run ends")
            self._write_status(controller.status(fleet.phases))
            controller.waits.check(limit, scorer_waits(questions.silent()))

    def _write_status(self, status: Status) -> None:
        """Write `status.json`. The run goes on if that fails, and says so once."""
        try:
            write_whole(self.run_dir.status, msgspec.json.encode(status))
        except OSError as error:
            if not self._status_failed:
                self.progress.note(f"{self.run_dir.status} cannot be written: {error.strerror}; the run goes on")
            self._status_failed = True

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Handle `interrupt` and, in the program's main thread, Ctrl-C.

        The first one drains the run, the second ends it at once.
        """
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()

        def interrupt() -> None:
            if self._controller is None or self._controller.stopping:
                assert main is not None
                main.cancel()
            else:
                self.progress.note("stopping after what is in training (Ctrl-C again to stop at once)")
                self._controller.stop()

        in_main = threading.current_thread() is threading.main_thread()
        signals = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        for each in signals:
            loop.add_signal_handler(each, interrupt)
        self._interrupt = partial(loop.call_soon_threadsafe, interrupt)
        if self._interrupted:
            interrupt()
        try:
            yield
        finally:
            self._interrupt = None
            for each in signals:
                loop.remove_signal_handler(each)


Execute = Callable[[RunSession], RunSession]
"""Executes a session to its end, and returns it."""


def first_cause(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that a person should read: the first one of Headrace's own, or else the first one."""
    found: BaseException = failures.subgroup(HeadraceError) or failures
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def start_run(
    config: Config,
    progress: Progress,
    given: Given = NOTHING,
    *,
    files: Mapping[str, str] = {},
    execute: Execute = RunSession.execute,
    overwrite: bool = False,
) -> RunSession:
    """Start a new run. A user's mistake that shows before the first version is served leaves no run directory behind.

    Nor does Ctrl-C while the processes of the run start. `given` replaces what the configuration names. `files` are
    written into the run directory, each under its name. `execute` executes the session. With `overwrite`, a run of the
    same name is removed once the input of the new one is found to be right.
    """
    config, names = pinned(with_name(config))
    for key, name in names.items():
        progress.note(f"{key}: {name}")
    config, _ = place_run(config, hosts_of(config))
    check_store(config, new=True)
    with contextlib.ExitStack() as replacing:
        run_dir = RunDir.of(config)
        remove_old: Callable[[], None] = lambda: None  # noqa: E731
        if overwrite and run_dir.path.exists():
            with lock_run(run_dir.journal):
                remove_old = replacing.enter_context(run_dir.set_aside())
        run_dir = RunDir.create(config)
        session = None
        try:
            for name, text in files.items():
                (run_dir.path / name).write_text(text)
            task, chat = check_inputs(config, given)
            check_models(config)
            remove_old()
            # The lock is held from here on: a resume of a run that is only starting is refused.
            with lock_run(run_dir.journal) as lock, run_dir.report_full_disk():
                make_journal = partial(Journal, lock=lock)
                session = RunSession(config, run_dir, progress, task, chat, journal=make_journal, hub_names=names)
                return execute(session)
        except (UserError, KeyboardInterrupt) as error:
            resumable = isinstance(error, DiskError) or (session is not None and session.began)
            if isinstance(error, KeyboardInterrupt):
                resumable = session is not None and session.started
            if not (resumable and run_dir.journal.is_file()):
                shutil.rmtree(run_dir.path, ignore_errors=True)
            raise


def _set_damage_aside(run_dir: RunDir, policy: str) -> Iterator[str]:
    """Set aside what is damaged and not needed to train. Yield a line about each file, and about lost commits."""
    for path in (run_dir.metrics, run_dir.timeline, run_dir.status, run_dir.summary, run_dir.report):
        problem = f"{path} is not a file" if path.exists() and not path.is_file() else ""
        if path == run_dir.timeline:
            problem = problem or timeline_damage(path)
        if problem:
            yield f"{problem}; it is kept as {set_aside(path).name}, and a new one begins"
    with open_readonly(run_dir.journal) as journal:
        last = journal.last_step(policy)
    if (reported := reported_step(run_dir.metrics)) > last:
        log = run_dir.journal.with_name(f"{run_dir.journal.name}-wal")
        kept = ""
        if log.is_file() and log.stat().st_size:
            shutil.copyfile(log, log.with_name(f"damaged-{log.name}"))
            kept = f" A copy of it is kept as damaged-{log.name}."
        yield (
            f"{run_dir.journal} ends with step {last}, but step {reported} was reported: its last commits are lost, "
            f"because {log.name} is missing or damaged.{kept} The run goes on from what is left"
        )


def _scaled_to(found: Any, config: Config) -> list[int] | None:
    """Return the ranks of the engines that a run was scaled to; None if the journal does not have them."""
    limit = len(config.engine.urls) or PROCESSES
    if not isinstance(found, list) or not all(isinstance(rank, int) and 0 <= rank < limit for rank in found):
        return None
    return sorted(set(found)) or None


def resume_run(
    path: str | Path,
    progress: Progress,
    settings: Iterable[str],
    given: Given = NOTHING,
    *,
    execute: Execute = RunSession.execute,
) -> RunSession:
    """Continue a run from its newest checkpoint, or begin it if it ended before it began.

    `settings` change its configuration; the changes are shown. The changed configuration is kept once every process has
    started with it. `given` and `execute` are those of `start_run`.
    """
    run_dir, before = RunDir.open(path)
    settings = list(settings)
    config = pinned(with_settings(before, settings)).config
    config, _ = place_run(config, hosts_of(config))
    check_store(config, new=not run_dir.journal.is_file())
    if not run_dir.journal.is_file():
        with lock_run(run_dir.journal) as lock:
            return _begin_again(run_dir, config, progress, given, execute, partial(Journal, lock=lock))
    # The lock is held from here on: another resume of the same run is refused before it starts anything.
    with check_resumable(run_dir.journal) as lock:
        as_scaled = not any(ENGINE_KEYS.search(setting.partition("=")[0]) for setting in settings)
        journal = partial(Journal, lock=lock)
        return _resume(run_dir, before, config, progress, given, execute, journal, as_scaled=as_scaled)


def _begin_again(
    run_dir: RunDir,
    config: Config,
    progress: Progress,
    given: Given,
    execute: Execute,
    make_journal: Callable[..., Journal],
) -> RunSession:
    """Begin a run whose processes were ended before the first of them had anything to do."""
    if run_dir.metrics.exists() or any(run_dir.checkpoints.glob("step-*")) or (run_dir.path / "segments").exists():
        raise UserError(f"{run_dir.path}: nothing to resume (it has no journal.db)")
    task, chat = check_inputs(config, given)
    check_models(config)
    progress.note("the run had ended before it began: it begins now")
    with run_dir.report_full_disk(), run_dir.with_trial_config(config):
        return execute(RunSession(config, run_dir, progress, task, chat, journal=make_journal))


def _resume(
    run_dir: RunDir,
    before: Config,
    config: Config,
    progress: Progress,
    given: Given,
    execute: Execute,
    make_journal: Callable[..., Journal],
    *,
    as_scaled: bool,
) -> RunSession:
    """Resume a run that has a journal; if `as_scaled`, with the engines that it was scaled to."""
    _refuse_finished(run_dir, config)
    for line in _set_damage_aside(run_dir, config.policy_name):
        progress.note(line)
    task, chat = check_inputs(config, given)
    with open_readonly(run_dir.journal) as journal:
        meta, last = journal.meta(), journal.training_window()
    stretches = [*meta.get(STRETCHES, []), *([last] if last else [])]
    known = meta.get("tokenizer")
    ranks = _scaled_to(meta.get(ENGINES), config) if as_scaled else None
    if known is None:
        progress.note("the journal has no digest of the run's tokenizer; that of today is recorded")
    elif known != chat.digest:
        progress.note(f"[model] path: tokenizer.json of {config.model.path} has changed since the run began")
    check_models(config)
    old, new = dump_config(before).splitlines(), dump_config(config).splitlines()
    for line in old:
        if line not in new:
            progress.note(f"config was: {line}")
    for line in new:
        if line not in old:
            progress.note(f"config now: {line}")
    with run_dir.report_full_disk(), run_dir.with_trial_config(config):
        session = RunSession(
            config,
            run_dir,
            progress,
            task,
            chat,
            journal=make_journal,
            tokenizer_known=known is not None,
            ranks=ranks,
            stretches=stretches,
        )
        return execute(session)


def _refuse_finished(run_dir: RunDir, config: Config) -> None:
    """Raise `RunFinished` if the run has ended in order with all its versions."""
    with open_readonly(run_dir.journal) as journal:
        steps, outcome = journal.last_step(config.policy_name), journal.meta().get("outcome")
    versions = steps // config.delivery.publish_every
    if outcome == "finished" and versions >= config.run.versions:
        raise RunFinished(
            f"{run_dir.path} is finished, with {versions} versions; train more of them with "
            f"`headrace resume {run_dir.path} --set run.versions={2 * versions}`"
        )

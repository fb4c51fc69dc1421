"""The worker processes of a run, and the handles by which the controller talks to them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from headrace.buffer.reader import open_readonly
from headrace.channel.events import Events
from headrace.channel.files import FilesComplete, write_folder
from headrace.channel.heartbeats import Welcome
from headrace.channel.hub import Hub
from headrace.channel.worker_side import sweep_marked
from headrace.cluster.inventory import chosen_hosts, place_run
from headrace.cluster.launchers.local import make_launcher
from headrace.cluster.mps import Mps, sweep_daemons
from headrace.cluster.placement import Host, Place, one_more
from headrace.cluster.supervision import Fleet, SeveralHosts
from headrace.config import AgentTaskConfig, Config, dump_config
from headrace.delivery.setup import choose, prepare
from headrace.delivery.transports.tcp_wire import KEYS
from headrace.engines.pool import EnginePool
from headrace.engines.serving import RemoteEngine
from headrace.engines.vllm.building import check_hosts
from headrace.errors import UserError
from headrace.gateway.agents import AgentTask
from headrace.gateway.relay import KEY_VARIABLE, Relay, checked_key
from headrace.gateway.session import new_key
from headrace.run_dir import RunDir, write_whole
from headrace.tasks.base import Task
from headrace.tasks.chat import ChatFormat
from headrace.training.remote import RENDEZVOUS, RemoteTrainer

TRAINER = "trainer-0"
GATEWAY = "gateway-0"


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

    def make_gateway(self, pool: EnginePool, task: Task, chat: ChatFormat, note: Callable[[str], None]) -> Relay | None:
        """Make the handle of the gateway's process; None if the run has no gateway. Requests go to `pool`."""
        config, own = self._config, task if isinstance(task, AgentTask) else None
        if own is None and not config.gateway.serve:
            return None
        key = os.environ.get(KEY_VARIABLE)
        return Relay(
            GATEWAY,
            self.fleet.hub,
            pool,
            chat,
            model=Path(config.model.path).name,
            bind=config.gateway.bind,
            port=config.gateway.port,
            key=checked_key(key) if key else new_key(),
            max_turns=config.rollouts.max_turns,
            session_seconds=config.pipeline.stall_seconds if own is None else own.timeout,
            agents=None if own is None else own.agents,
            file=self._run_dir.path / "gateway.json",
            note=note,
        )

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

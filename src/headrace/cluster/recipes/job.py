"""A run as a job of a scheduler: how many nodes and GPUs it needs, and what its recipes say.

The sizes follow from the configuration where it gives numbers or names GPUs. The run is placed on the nodes as `train`
will place it, so a job that could not start is refused before it waits in a queue. The model is not read: it may be
only where the job runs.
"""

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.cluster.placement import Gpu, Host, parse_gpus, place
from headrace.config.schema import Config
from headrace.errors import ConfigError, UserError
from headrace.run_dir import DEFAULT_NAME

SIGNAL_SECONDS = 300
"""Seconds before the time limit at which a run is told to stop and to write its checkpoint."""
SPARE_CORES = 2
"""Cores of a node beside the compute threads of its workers: for the controller, and for Ray."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")
_WORD = re.compile(r"[\w.,:/@#+-]+")
_NAME_LENGTH = 40


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `headrace launch` is told beside the configuration. None: it follows from the configuration, or is open."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    image: str | None = None


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the recipes say about one run."""

    name: str
    config: str
    """The path of the configuration, relative to `directory` unless it is absolute."""
    settings: list[str]
    run_dir: str
    directory: str
    nodes: int
    gpus_per_node: int
    cores: int
    """The cores that the fullest node needs at least."""
    named: list[str]
    """The nodes that the configuration names. Empty if any will do."""
    names_hosts: bool
    """Whether `[cluster] hosts` says which nodes are used, and in which order."""
    uses_ray: bool
    """Whether the run starts its workers by Ray. On one node it needs no Ray."""
    options: Options
    python: str = sys.executable
    """The Python that has Headrace and Ray. In an image it is `python`."""

    @property
    def seconds(self) -> int | None:
        """The time limit in seconds."""
        return None if self.options.time is None else seconds_of(self.options.time)

    @property
    def signal_seconds(self) -> int:
        """How long before the time limit the run is told to stop: at most a quarter of the whole time."""
        return SIGNAL_SECONDS if self.seconds is None else min(SIGNAL_SECONDS, self.seconds // 4)


def make_job(config: Config, path: str, settings: Sequence[str], options: Options) -> Job:
    """Return the job of a run. Raises `UserError`, of one line, if the run does not fit on its nodes."""
    for name in ("partition", "account", "image"):
        value = getattr(options, name)
        if value is not None and not _WORD.fullmatch(value):
            raise UserError(f"--{name} {value!r}: only letters, digits and . , : / @ # + - are possible")
    if options.time is not None:
        seconds_of(options.time)
    named, nodes, gpus = _size(config, options)
    uses_ray = nodes > 1 or config.pipeline.launcher == "ray"
    launcher = config.pipeline.launcher
    if uses_ray and launcher not in ("auto", "ray"):
        raise ConfigError(f'[pipeline] launcher = "{launcher}": {nodes} nodes need "ray" (leave the key out)')
    names = [*named, *(f"node{number}" for number in range(len(named) + 1, nodes + 1))]
    present = tuple(Gpu(str(index)) for index in range(gpus))
    hosts = [Host(name, present, address=name if uses_ray else "") for name in names]
    placement = place(config, hosts)
    placement.applied(config)
    threads = [sum(at.threads for at in placement.places if at.host == host) for host in placement.hosts]
    run = config.run.name or DEFAULT_NAME
    return Job(
        name=re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")[:_NAME_LENGTH].strip("-") or "headrace",
        config=path,
        settings=list(settings),
        run_dir=str(Path(config.run.directory) / run),
        directory=str(Path.cwd()),
        nodes=nodes,
        gpus_per_node=gpus,
        cores=options.cpus_per_node or max(threads) + SPARE_CORES,
        named=named,
        names_hosts=bool(config.cluster.hosts),
        uses_ray=uses_ray,
        options=options,
    )


def seconds_of(time: str) -> int:
    """Return the seconds of a time as Slurm writes it: minutes, HOURS:MINUTES:SECONDS, DAYS-HOURS:MINUTES, ..."""
    match = _TIME.fullmatch(time)
    if match is None:
        raise UserError(f"--time {time!r} is no time (02:30:00, 1-12 and 90, in minutes, are)")
    first, second, third = (int(match[part] or 0) for part in ("first", "second", "third"))
    if match["days"] is not None:
        return int(match["days"]) * 86400 + first * 3600 + second * 60 + third
    return first * 3600 + second * 60 + third if match["third"] is not None else first * 60 + second


def _size(config: Config, options: Options) -> tuple[list[str], int, int]:
    """Return the nodes that the configuration names, the number of all nodes, and the GPUs of each."""
    counted, slots = 0, set[tuple[str | None, int]]()
    sides = [("training", config.training.device, config.training.gpus)]
    if not config.engine.urls:
        sides.append(("engine", config.engine.device, config.engine.gpus))
    open_sides = []
    for section, device, gpus in sides:
        if device == "cpu":
            continue
        if gpus == "auto":
            open_sides.append(section)
        elif isinstance(gpus, int):
            counted += gpus
        else:
            slots.update(parse_gpus(section, gpus))
    if open_sides and options.gpus_per_node is None:
        raise UserError(f'--gpus-per-node is needed: [{open_sides[0]}] gpus is "auto" (0 runs on CPUs)')
    hosts = list(config.cluster.hosts)
    hosts += sorted({host for host, _ in slots if host is not None} - set(hosts))
    total, nodes = counted + len(slots), options.nodes
    if nodes is None:
        nodes = len(hosts) or math.ceil(total / (options.gpus_per_node or total or 1)) or 1
    if nodes < len(hosts):
        raise UserError(f"--nodes {nodes}: the configuration names {len(hosts)} ({', '.join(hosts)})")
    if options.gpus_per_node is not None:
        return hosts, nodes, options.gpus_per_node
    highest = max((index for _, index in slots), default=-1)
    return hosts, nodes, max(highest + 1, math.ceil(total / nodes))

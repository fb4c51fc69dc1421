"""Placement: on which host and on which GPUs every worker of a run is, computed from the configuration and the hosts.

Nothing here looks at the machine: `cluster.inventory` says what a host has. The rules, in their order:

- `gpus` of [engine] and [training] is a number, or names GPUs: `[0, 1]`, `"0-5"`, or `"hostA:0-7,hostB:0-3"`. An index
  counts the GPUs that this run may see, so a scheduler's `CUDA_VISIBLE_DEVICES` is respected.
- A number of GPUs for the trainer is taken from the end of the first host that has so many, and engines take the GPUs
  before them. One engine never spans two hosts.
- What is `"auto"` gets the rest. If both are, a single GPU is shared, and several are divided so that the slower side
  gets more.
- Without GPUs, trainer ranks take one host after the other, and engines go where the fewest workers are.
- The model of a scorer is on the GPU that its section names, or else on the CPU of the first host. Engines and trainer
  take other GPUs, if there are any, unless they name that GPU too.

A worker sees its own GPUs first. After them it sees those whose memory its transport maps, and uses them for nothing
else.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from headrace.config.base import Gpus
from headrace.config.checks import check_together, check_transport, check_trusted
from headrace.config.declared import transport_facts
from headrace.config.schema import Config, EngineRange
from headrace.config.stores import is_url
from headrace.errors import ConfigError, UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_RANGE = re.compile(r"(?:(?P<host>[^:,]+):)?(?P<first>\d+)(?:-(?P<last>\d+))?")


class Gpu(msgspec.Struct, frozen=True):
    """A GPU of a host, as `CUDA_VISIBLE_DEVICES` takes it (an index or a UUID), and its memory in bytes."""

    id: str
    memory: int = 0
    name: str = ""
    """The name of the product, if it is known."""


class Host(msgspec.Struct, frozen=True):
    """A host with the GPUs and cores that the run may use."""

    name: str
    gpus: tuple[Gpu, ...] = ()
    cores: int = 1
    address: str = ""
    """The address at which other hosts reach it. Empty on a run of one host."""


class Slot(msgspec.Struct, frozen=True):
    """One GPU of one host, by its index on that host."""

    host: str
    index: int

    def __str__(self) -> str:
        return f"GPU {self.index} of {self.host}"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker is."""

    role: str
    rank: int
    host: str
    gpus: tuple[str, ...] = ()
    """Its own GPUs. Empty if it computes on the CPU."""
    maps: tuple[str, ...] = ()
    """The other GPUs that it must see, because its transport maps their memory."""
    neighbours: tuple[str, ...] = ()
    """The names of the workers that share a GPU with it."""
    threads: int = 1
    address: str = ""
    """The address at which other hosts reach its host. Empty on a run of one host."""
    meet_at: str = ""
    """The address of its host at which this trainer rank meets the others. Empty if they meet in the run directory."""

    @property
    def name(self) -> str:
        """The name of the worker: `engine-0`, `trainer-0`, `scorer-0`, ..."""
        return f"{self.role}-{self.rank}"

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that show these GPUs, and no others, to the worker."""
        return {VISIBLE: ",".join((*self.gpus, *self.maps))}


class Placement(msgspec.Struct, frozen=True):
    """The places of all workers: trainer ranks first, then engines, then the models of scorers, in order of ranks."""

    places: tuple[Place, ...]

    def of(self, role: str) -> list[Place]:
        """Return the places of the workers with this role."""
        return [place for place in self.places if place.role == role]

    @property
    def hosts(self) -> list[str]:
        """The names of the hosts that weights travel between: those of trainer ranks and engines."""
        return list(dict.fromkeys(place.host for place in self.places if place.role != "scorer"))

    def applied(self, config: Config) -> Config:
        """Return the configuration with what follows from the placement, checked again.

        These are the numbers of engines and ranks, and on several hosts the transport of the weights.
        """
        engine, training, delivery = config.engine, config.training, config.delivery
        if len(self.hosts) > 1:
            if delivery.transport == "auto":
                delivery = msgspec.structs.replace(delivery, transport="tcp")
            _check_hosts(config, delivery.transport, {place.host for place in self.of("trainer")})
        # Nothing is known of the devices of servers that run already. Such a server refuses what it cannot map.
        served = [] if engine.urls else self.of("engine")
        _check_devices(delivery.transport, [*self.of("trainer"), *served])
        if not engine.urls and not isinstance(engine.count, EngineRange):
            engine = msgspec.structs.replace(engine, count=len(self.of("engine")))
        training = msgspec.structs.replace(training, ranks=len(self.of("trainer")))
        # Each side must know the device of the other, and sees only its own GPUs.
        engine = msgspec.structs.replace(engine, device="cpu") if engine.gpus == 0 else engine
        training = msgspec.structs.replace(training, device="cpu") if training.gpus == 0 else training
        found = msgspec.structs.replace(config, engine=engine, training=training, delivery=delivery)
        check_together(found)
        return found


Rates = Callable[[], tuple[float, float]]
"""Returns the estimated seconds per version of generation and of training, on one GPU each."""


def place(config: Config, hosts: Sequence[Host], rates: Rates = lambda: (1.0, 1.0)) -> Placement:
    """Place every worker of a run on these hosts. Raises `ConfigError`, of one line, if that is impossible.

    `rates` is asked only if GPUs have to be divided between the two sides.
    """
    serving, training = _divide(config, hosts, rates)
    names, size = [host.name for host in hosts], config.engine.gpus_per_engine
    ranks: list[tuple[str, list[Slot]]] = [(slot.host, [slot]) for slot in training]
    if not ranks:
        ranks = [(names[rank % len(names)], []) for rank in range(config.training.ranks or 1)]
    engines = [(serving[i].host, serving[i : i + size]) for i in range(0, len(serving), size)]
    if not engines:
        engines = [(name, []) for name in _spread(config.engine.processes, names, [name for name, _ in ranks])]
    workers = [("trainer", rank, *where) for rank, where in enumerate(ranks)]
    workers += [("engine", rank, *where) for rank, where in enumerate(engines)]
    scorers = _scorers(config, hosts)
    workers += [("scorer", rank, own[0].host if own else names[0], own) for rank, own in enumerate(scorers)]
    threads = [section.threads for section in config.scorer_models.values()]
    addresses = {host.name: host.address for host in hosts}
    ids = {Slot(host.name, i): gpu.id for host in hosts for i, gpu in enumerate(host.gpus)}
    maps = _maps_trainer(config) and len({host for role, _, host, _ in workers if role != "scorer"}) == 1
    meeting = _meeting(config, hosts, [host for host, _ in ranks])

    def at(role: str, rank: int, host: str, own: list[Slot]) -> Place:
        mapped = [slot for slot in training if maps and role == "engine" and own and slot.host == host]
        others = [f"{r}-{n}" for r, n, _, slots in workers if (r, n) != (role, rank) and set(slots) & set(own)]
        number = {"engine": config.engine.threads, "trainer": config.training.threads}
        return Place(
            role=role,
            rank=rank,
            host=host,
            gpus=tuple(ids[slot] for slot in own),
            maps=tuple(ids[slot] for slot in mapped if slot not in own),
            neighbours=tuple(others),
            threads=threads[rank] if role == "scorer" else number[role],
            address=addresses[host],
            meet_at=meeting.get(host, "") if role == "trainer" else "",
        )

    return Placement(tuple(at(*worker) for worker in workers))


def move(place: Place, places: Sequence[Place], hosts: Sequence[Host]) -> Place | None:
    """Return another place for a worker whose host is lost, on GPUs that no worker uses, or None if there is none."""
    used = {(other.host, gpu) for other in places for gpu in other.gpus}
    for host in hosts:
        free = [gpu.id for gpu in host.gpus if (host.name, gpu.id) not in used]
        if host.name != place.host and len(free) >= len(place.gpus):
            own = tuple(free[: len(place.gpus)])
            return msgspec.structs.replace(
                place, host=host.name, address=host.address, gpus=own, maps=(), neighbours=()
            )
    return None


def one_more(config: Config, rank: int, places: Sequence[Place], hosts: Sequence[Host]) -> Place:
    """Return a place for an engine that joins a live run, beside these places. Raises `UserError` if there is none.

    An engine on a GPU gets GPUs that no worker has a place on. A run that began on one host stays there, unless its
    transport crosses hosts.
    """
    used, transport = {place.host for place in places}, config.delivery.transport
    crosses = transport != "auto" and transport_facts(transport).crosses_hosts
    near = [host for host in hosts if crosses or host.name in used]
    own: tuple[str, ...] = ()
    if any(place.gpus for place in places if place.role == "engine"):
        taken, size = {(place.host, gpu) for place in places for gpu in place.gpus}, config.engine.gpus_per_engine
        if config.engine.gpus != "auto":
            raise UserError(
                "[engine] gpus: there is no place for one more engine on the GPUs that it gives the engines"
            )
        free = {host.name: [gpu.id for gpu in host.gpus if (host.name, gpu.id) not in taken] for host in near}
        name = next((name for name, gpus in free.items() if len(gpus) >= size), None)
        if name is None:
            raise UserError(f"there is no free GPU for one more engine (GPUs of each engine: {size})")
        own = tuple(free[name][:size])
    else:
        [name] = _spread(1, [host.name for host in near], [place.host for place in places])
    mapped = [gpu for place in places if place.role == "trainer" and place.host == name for gpu in place.gpus]
    return Place(
        role="engine",
        rank=rank,
        host=name,
        gpus=own,
        maps=tuple(mapped) if own and _maps_trainer(config) and used == {name} else (),
        threads=config.engine.threads,
        address=next(host.address for host in near if host.name == name),
    )


def check_memory(placement: Placement, hosts: Sequence[Host], needs: Mapping[str, int]) -> None:
    """Raise `ConfigError` if a GPU has less memory than its workers need.

    `needs` is the least need in bytes of one trainer rank and of one engine, by role. A GPU whose memory is not known
    is not checked.
    """
    for host in hosts:
        for gpu in host.gpus:
            users = [place for place in placement.places if place.host == host.name and gpu.id in place.gpus]
            here = {user.name: needs.get(user.role, 0) // len(user.gpus) for user in users}
            if gpu.memory and sum(here.values()) > gpu.memory:
                listed = ", ".join(f"{name} needs {need / 2**30:.1f}" for name, need in here.items())
                raise ConfigError(f"GPU {gpu.id} of {host.name} has {gpu.memory / 2**30:.1f} GiB of memory: {listed}")


def _meeting(config: Config, hosts: Sequence[Host], used: Sequence[str]) -> dict[str, str]:
    """Return the address at which trainer ranks meet, by host. On the controller's host they meet in the run directory.

    Raises `ConfigError` if they are on several hosts and the network between them is not trusted.
    """
    if set(used) <= {hosts[0].name}:
        return {}
    if len(set(used)) == 1:
        return {used[0]: "127.0.0.1"} if len(used) > 1 else {}
    where = ", ".join(dict.fromkeys(used))
    check_trusted(config.cluster.trusted_network, f"the trainer's ranks would talk over NCCL or gloo between {where}")
    return {host.name: host.address for host in hosts}


def _divide(config: Config, hosts: Sequence[Host], rates: Rates) -> tuple[list[Slot], list[Slot]]:
    """Return the GPUs of the engines, one engine's after the other's, and the GPUs of the trainer ranks."""
    engine, trainer, size = config.engine, config.training, config.engine.gpus_per_engine
    present = [Slot(host.name, index) for host in hosts for index in range(len(host.gpus))]
    taken = {slot for own in _scorers(config, hosts) for slot in own}
    everything = [slot for slot in present if slot not in taken] or present
    number = engine.processes if isinstance(engine.count, EngineRange) else engine.count
    engines = _Wish("engine", "count", number, size, "cpu" if engine.urls else engine.device, engine.gpus, hosts)
    ranks = _Wish("training", "ranks", trainer.ranks, 1, trainer.device, trainer.gpus, hosts)
    if not everything or engines.number == ranks.number == 0:
        return [], []
    if len(everything) == 1:
        if size > 1 or (ranks.number or 1) > 1:
            raise ConfigError(f"[{'engine] gpus_per_engine' if size > 1 else 'training] ranks'}: there is only one GPU")
        return everything * (1 if engines.number is None else engines.number), everything if ranks.number != 0 else []
    own = ranks.named
    if own is None:
        free = [slot for slot in everything if slot not in (engines.named or ())]
        kept = len(everything) - len(free) if engines.named is not None else engines.number
        count = _share(config, free, len(everything), kept, rates) if ranks.number is None else ranks.number
        left = len(everything) - (kept or 0)
        if count > left or (count == 0 and ranks.number is None):
            raise ConfigError(
                f"[training] gpus: the trainer needs {max(1, count)}, and the engines leave {left} of "
                f"{len(everything)} (name a GPU in both sections to share it)"
            )
        own = _last(free, count)
    if engines.named is not None:
        serving = engines.named
    else:
        serving = _whole_engines([slot for slot in everything if slot not in own], size)
        count = len(serving) if engines.number is None else engines.number
        if count > len(serving) or (count == 0 and engines.number is None):
            raise ConfigError(
                f"[engine] gpus: the engines need {max(size, count)}, and the trainer leaves {len(serving)} of "
                f"{len(everything)} (name a GPU in both sections to share it)"
            )
        serving = serving[:count]
    if len(own) > 1 and (shared := [slot for slot in own if slot in serving]):
        raise ConfigError(f"[engine] gpus: {shared[0]} is a trainer rank's; only a trainer of one rank shares its GPU")
    for start in range(0, len(serving), size):
        if len({slot.host for slot in serving[start : start + size]}) > 1:
            raise ConfigError(f"[engine] gpus: an engine of {size} GPUs would span two hosts")
    return serving, own


def _scorers(config: Config, hosts: Sequence[Host]) -> list[list[Slot]]:
    """Return the GPU of each model that scores in a worker process of its own; an empty list stands for the CPU."""
    found = []
    for section, scorer in config.scorer_models.items():
        own = [_found(section, named, hosts) for named in parse_gpus(section, scorer.gpus)] if scorer.gpus else []
        if len(own) > 1:
            raise ConfigError(f"[{section}] gpus: a scorer's model has one GPU, and {len(own)} are named")
        found.append(own)
    return found


class _Wish:
    """What one side of a run asks for: `named` GPUs, a `number` of them, or (both None) what is best."""

    def __init__(
        self, section: str, key: str, count: int | None, size: int, device: str, gpus: Gpus, hosts: Sequence[Host]
    ) -> None:
        self.named: list[Slot] | None = None
        self.number = count * size if count is not None else None
        present = sum(len(host.gpus) for host in hosts)
        if device == "cpu":
            if gpus not in ("auto", 0):
                raise ConfigError(f"[{section}] gpus: nothing of this side runs on a GPU of this run")
            self.number, self.named = 0, []
            return
        if device == "cuda" and not present:
            raise ConfigError(f'[{section}] device = "cuda", but there is no GPU')
        if gpus == "auto":
            return
        if isinstance(gpus, int):
            number = gpus
            if number > present:
                raise ConfigError(f"[{section}] gpus = {number}, but there {_are(present)}")
        else:
            self.named = [_found(section, named, hosts) for named in parse_gpus(section, gpus)]
            number = len(self.named)
        if number % size:
            raise ConfigError(f"[{section}] gpus: {number} cannot be divided into engines of gpus_per_engine = {size}")
        if number and self.number not in (None, number):
            raise ConfigError(f"[{section}] {key} = {count}, but gpus make {number // size}; leave one of them out")
        if section == "training" and len(set(self.named or ())) < len(self.named or ()):
            raise ConfigError(f"[{section}] gpus: a GPU is named twice; every rank needs its own")
        self.number = number


def parse_gpus(section: str, gpus: str | list[int]) -> Iterator[tuple[str | None, int]]:
    """Yield the host, if one is named, and the index of every GPU that a list or a text such as `"0-5,7"` names."""
    for word in gpus if isinstance(gpus, list) else gpus.replace(" ", "").split(","):
        match = _RANGE.fullmatch(str(word))
        if match is None:
            raise ConfigError(f'[{section}] gpus: {word!r} names no GPU ("0-5", "0,2" or "host:0-3" would)')
        for index in range(int(match["first"]), int(match["last"] or match["first"]) + 1):
            yield match["host"], index


def _found(section: str, named: tuple[str | None, int], hosts: Sequence[Host]) -> Slot:
    name, index = named
    if name is None and len(hosts) > 1:
        raise ConfigError(f'[{section}] gpus: say of which host ("{hosts[0].name}:{index}"), because there are several')
    host = next((host for host in hosts if name in (None, host.name)), None)
    if host is None:
        raise ConfigError(f"[{section}] gpus: there is no host {name!r} (only {', '.join(h.name for h in hosts)})")
    if index >= len(host.gpus):
        raise ConfigError(f"[{section}] gpus: {host.name} has no GPU {index}; there {_are(len(host.gpus))}")
    return Slot(host.name, index)


def _share(config: Config, free: Sequence[Slot], total: int, kept: int | None, rates: Rates) -> int:
    """Return how many of the GPUs the trainer gets, where `kept` are the engines' or None if that is open too.

    It gets no more `free` ones than one host has, unless its ranks may talk between hosts.
    """
    size, tensor = config.engine.gpus_per_engine, config.training.tensor_parallel
    most = total - (kept if kept is not None else size)
    if not config.cluster.trusted_network:
        most = min(most, max(Counter(slot.host for slot in free).values(), default=0))
    if not _may_have_ranks(config):
        return min(1, most)
    if kept is not None:
        return most // tensor * tensor
    generation, training = rates()
    possible = range(tensor, most + 1, tensor)
    return min(possible, key=lambda n: max(generation / ((total - n) // size), training / n), default=0)


def _may_have_ranks(config: Config) -> bool:
    """Return whether several ranks are possible with the rest of the configuration."""
    training = msgspec.structs.replace(config.training, ranks=2 * config.training.tensor_parallel)
    several = msgspec.structs.replace(config, training=training)
    try:
        check_together(several)
        check_transport(several)
    except ConfigError:
        return False
    return True


def _last(free: list[Slot], count: int) -> list[Slot]:
    """Return the last GPUs of the first host that has so many, or of the first hosts if none has."""
    by_host = [list(slots) for _, slots in itertools.groupby(free, key=lambda slot: slot.host)]
    fitting = [slots for slots in by_host if len(slots) >= count][:1]
    found: list[Slot] = []
    for slots in fitting or by_host:
        found += slots[max(0, len(slots) - (count - len(found))) :]
    return found


def _whole_engines(free: list[Slot], size: int) -> list[Slot]:
    """Return those of the GPUs that make whole engines on one host each."""
    by_host = [list(slots) for _, slots in itertools.groupby(free, key=lambda slot: slot.host)]
    return [slot for slots in by_host for slot in slots[: len(slots) // size * size]]


def _spread(count: int, names: list[str], taken: list[str]) -> list[str]:
    """Return a host for each engine on a CPU: where the fewest workers are, and the fewest engines among those."""
    found: list[str] = []
    for _ in range(count):
        order = {name: ((taken + found).count(name), found.count(name), -i) for i, name in enumerate(names)}
        found.append(min(names, key=order.__getitem__))
    return sorted(found, key=names.index)


def _check_hosts(config: Config, transport: str, trainers: set[str]) -> None:
    """Raise `ConfigError` if something in the configuration cannot span several hosts."""
    if not transport_facts(transport).crosses_hosts:
        raise ConfigError(
            f'[delivery] transport = "{transport}" stays on one host, and the run has several ("tcp" works)'
        )
    if len(trainers) > 1 and not config.training.checkpoint_directory:
        raise ConfigError("[training] checkpoint_directory: ranks on several hosts need one that all of them share")
    if len(trainers) > 1 and is_url(config.training.checkpoint_directory):
        raise ConfigError(
            "[training] checkpoint_directory: ranks on several hosts need a path that all of them share, not a URL"
        )
    if transport_facts(transport).needs_trust:
        check_trusted(config.cluster.trusted_network, f'[delivery] transport = "{transport}" would leave the host')


def _check_devices(transport: str, places: Sequence[Place]) -> None:
    """Raise `ConfigError` if the transport cannot connect the devices of these workers."""
    what, facts = f'[delivery] transport = "{transport}"', transport_facts(transport)
    on_gpus = {bool(place.gpus) for place in places}
    if facts.needs_gpu and on_gpus != {True}:
        raise ConfigError(f"{what} needs trainer and engines on GPUs")
    if facts.own_gpus and len(on_gpus) > 1:
        raise ConfigError(f"{what} needs trainer and engines all on GPUs, or all on CPUs")
    shared = next((place for place in places if place.neighbours), None)
    if facts.own_gpus and shared is not None:
        others = ", ".join(shared.neighbours)
        raise ConfigError(f"{what} needs a GPU for each process, and {shared.name} shares one with {others}")


def _maps_trainer(config: Config) -> bool:
    """Return whether engines map the memory of the trainer's GPUs."""
    transport = config.delivery.transport
    return transport == "auto" or transport_facts(transport).on_device


def _are(count: int) -> str:
    return "is no GPU" if count == 0 else "is one GPU" if count == 1 else f"are {count} GPUs"

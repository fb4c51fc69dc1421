"""Where workers are placed: the exact devices and environment of every worker, and the one line of every refusal."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cluster.inventory import Device, place_run, visible
from headrace.cluster.placement import Gpu, Host, Placement, check_memory, move, one_more, place
from headrace.config import Config, with_settings
from headrace.config.schema import GymTaskConfig, ModelConfig
from headrace.errors import ConfigError, HeadraceError, UserError

GIB = 1 << 30
MODEL = Path(__file__).parents[2] / "data" / "tiny_model"
CONFIG = Config(model=ModelConfig(path=str(MODEL)), task=GymTaskConfig(name="chain_sum"))


def host(gpus: int, name: str = "localhost", memory: int = 0) -> Host:
    return Host(name, tuple(Gpu(str(index), memory) for index in range(gpus)), cores=16)


def configured(*settings: str) -> Config:
    return with_settings(CONFIG, settings)


def shown(placement: Placement) -> dict[str, str]:
    """Worker -> `host` or `host:own GPUs` or `host:own GPUs+mapped GPUs`."""
    found = {}
    for worker in placement.places:
        gpus = ",".join(worker.gpus) + ("+" + ",".join(worker.maps) if worker.maps else "")
        found[worker.name] = worker.host + (f":{gpus}" if gpus else "")
    return found


def workers(**named: Any) -> dict[str, str]:
    """`trainer="6 7"` and `engine="0 1"` are on localhost unless they name a host; every engine maps `maps`."""
    found = {}
    for role in ("trainer", "engine"):
        for rank, where in enumerate(named[role].split()):
            place = where if where[0].isalpha() else f"localhost:{where}"
            found[f"{role}-{rank}"] = place + (f"+{named['maps']}" if role == "engine" and named.get("maps") else "")
    return found


TRUSTED = ("cluster.trusted_network=true", "training.checkpoint_directory=/shared")
VLLM = ("engine.kind=vllm", "engine.python=python")
CASES: dict[str, tuple[tuple[str, ...], list[Host], dict[str, str]]] = {
    "no GPU": ((), [host(0)], workers(trainer="localhost", engine="localhost")),
    "no GPU, two engines and two ranks": (
        ("engine.count=2", "training.ranks=2"),
        [host(0)],
        workers(trainer="localhost localhost", engine="localhost localhost"),
    ),
    "one GPU is shared": ((), [host(1)], workers(trainer="0", engine="0")),
    "one GPU is shared by two engines and the trainer": (
        ("engine.count=2",),
        [host(1)],
        workers(trainer="0", engine="0 0"),
    ),
    "one GPU named by both": (("engine.gpus=[0]", "training.gpus=[0]"), [host(1)], workers(trainer="0", engine="0")),
    "one GPU, the trainer on the CPU": (
        ("training.device=cpu",),
        [host(1)],
        workers(trainer="localhost", engine="0"),
    ),
    "one GPU, the engines on the CPU": (("engine.gpus=0",), [host(1)], workers(trainer="0", engine="localhost")),
    "both on the CPU beside a GPU": (
        ("engine.device=cpu", "training.device=cpu"),
        [host(1)],
        workers(trainer="localhost", engine="localhost"),
    ),
    "two GPUs, one each": ((), [host(2)], workers(trainer="1", engine="0", maps="1")),
    "two GPUs, named the other way round": (
        ("engine.gpus=[1]", "training.gpus=[0]"),
        [host(2)],
        workers(trainer="0", engine="1", maps="0"),
    ),
    "two GPUs, the second one unused": (
        ("engine.gpus=[0]", "training.gpus=[0]"),
        [host(2)],
        workers(trainer="0", engine="0"),
    ),
    "two engines on one GPU, the trainer on the other": (
        ("engine.gpus=[0, 0]", "training.gpus=[1]"),
        [host(2)],
        workers(trainer="1", engine="0 0", maps="1"),
    ),
    "6 + 2 of 8 by numbers": (
        ("engine.gpus=6", "training.gpus=2"),
        [host(8)],
        workers(trainer="6 7", engine="0 1 2 3 4 5", maps="6,7"),
    ),
    "6 + 2 of 8 by ranges": (
        ("engine.gpus=0-5", "training.gpus=6-7"),
        [host(8)],
        workers(trainer="6 7", engine="0 1 2 3 4 5", maps="6,7"),
    ),
    "7 + 1 of 8, the trainer follows": (
        ("engine.gpus=7",),
        [host(8)],
        workers(trainer="7", engine="0 1 2 3 4 5 6", maps="7"),
    ),
    "7 + 1 of 8 by the number of ranks": (
        ("training.ranks=1",),
        [host(8)],
        workers(trainer="7", engine="0 1 2 3 4 5 6", maps="7"),
    ),
    "the engines follow the trainer": (
        ("training.gpus=[0, 1]",),
        [host(4)],
        workers(trainer="0 1", engine="2 3", maps="0,1"),
    ),
    "two engines, the trainer takes the rest": (
        ("engine.count=2",),
        [host(4)],
        workers(trainer="2 3", engine="0 1", maps="2,3"),
    ),
    "fewer than there are": (
        ("engine.gpus=2", "training.gpus=1"),
        [host(8)],
        workers(trainer="7", engine="0 1", maps="7"),
    ),
    "divided evenly where both sides are equally fast": (
        (),
        [host(8)],
        workers(trainer="4 5 6 7", engine="0 1 2 3", maps="4,5,6,7"),
    ),
    "one rank where several are impossible": (
        (f"delivery.transport={Path(__file__).with_name('one_rank_transport.py')}:OneRank",),
        [host(4)],
        workers(trainer="3", engine="0 1 2"),
    ),
    "tensor ranks come in their multiples": (
        ("training.tensor_parallel=2", "engine.gpus=5"),
        [host(8)],
        workers(trainer="6 7", engine="0 1 2 3 4", maps="6,7"),
    ),
    "by a transport that maps nothing": (
        ("engine.gpus=1", "training.gpus=1", "delivery.transport=shm"),
        [host(2)],
        workers(trainer="1", engine="0"),
    ),
    "3 engines of 2 GPUs + 2": (
        (*VLLM, "engine.gpus=6", "engine.gpus_per_engine=2", "training.gpus=1"),
        [host(8)],
        workers(trainer="7", engine="0,1 2,3 4,5", maps="7"),
    ),
    "servers that run already take none of ours": (
        ("engine.kind=vllm", 'engine.urls=["http://a:1", "http://b:1"]'),
        [host(2)],
        workers(trainer="0 1", engine="localhost localhost"),
    ),
    "two hosts of 8": (
        ("engine.gpus=12", "training.gpus=4"),
        [host(8, "a"), host(8, "b")],
        workers(
            trainer="a:4 a:5 a:6 a:7",
            engine=" ".join([*(f"a:{i}" for i in range(4)), *(f"b:{i}" for i in range(8))]),
        ),
    ),
    "two hosts, one each": (
        ("engine.gpus=b:0-7", "training.gpus=a:0-7"),
        [host(8, "a"), host(8, "b")],
        workers(trainer=" ".join(f"a:{i}" for i in range(8)), engine=" ".join(f"b:{i}" for i in range(8))),
    ),
    "a trainer over two hosts": (
        ("training.gpus=10", "engine.gpus=2", *TRUSTED),
        [host(8, "a"), host(8, "b")],
        workers(trainer=" ".join([f"a:{i}" for i in range(8)] + ["b:6", "b:7"]), engine="b:0 b:1"),
    ),
    "an engine never spans two hosts": (
        (*VLLM, "engine.gpus_per_engine=2", "training.gpus=1"),
        [host(4, "a"), host(4, "b")],
        workers(trainer="a:3", engine="a:0,1 b:0,1 b:2,3"),
    ),
    "three hosts without GPUs": (
        ("engine.count=2",),
        [host(0, "a"), host(0, "b"), host(0, "c")],
        workers(trainer="a", engine="b c"),
    ),
    "three hosts without GPUs, two ranks": (
        ("engine.count=2", "training.ranks=2", *TRUSTED),
        [host(0, "a"), host(0, "b"), host(0, "c")],
        workers(trainer="a b", engine="b c"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_worker_has_its_place(name: str) -> None:
    settings, hosts, wanted = CASES[name]
    placement = place(configured(*settings), hosts)
    assert shown(placement) == wanted
    for worker in placement.places:
        # Its own GPUs come first in what it sees.
        assert worker.environment == {"CUDA_VISIBLE_DEVICES": ",".join((*worker.gpus, *worker.maps))}
    placed = placement.applied(configured(*settings))
    assert placed.engine.processes == len(placement.of("engine"))
    assert placed.training.processes == len(placement.of("trainer"))
    # A run that is resumed with what it was placed with is placed in the same way.
    assert place(placed, hosts) == placement


REFUSED: dict[str, tuple[tuple[str, ...], list[Host], str]] = {
    "more than there are": (("engine.gpus=9",), [host(8)], "[engine] gpus = 9, but there are 8 GPUs"),
    "none at all": (("training.gpus=1",), [host(0)], "[training] gpus = 1, but there is no GPU"),
    "an unknown index": (("engine.gpus=[8]",), [host(8)], "[engine] gpus: localhost has no GPU 8; there are 8 GPUs"),
    "an index of none": (("engine.gpus=[0]",), [host(0)], "[engine] gpus: localhost has no GPU 0; there is no GPU"),
    "a GPU where there is none": (
        ("training.device=cuda",),
        [host(0)],
        '[training] device = "cuda", but there is no GPU',
    ),
    "GPUs for the CPU": (
        ("engine.device=cpu", "engine.gpus=2"),
        [host(8)],
        "[engine] gpus: nothing of this side runs on a GPU of this run",
    ),
    "both sides together": (
        ("engine.gpus=6", "training.gpus=3"),
        [host(8)],
        "[training] gpus: the trainer needs 3, and the engines leave 2 of 8 (name a GPU in both sections to share it)",
    ),
    "engines beside a trainer's named GPUs": (
        ("engine.gpus=6", "training.gpus=[0, 1, 2]"),
        [host(8)],
        "[engine] gpus: the engines need 6, and the trainer leaves 5 of 8 (name a GPU in both sections to share it)",
    ),
    "nothing left for the trainer": (
        ("engine.gpus=8",),
        [host(8)],
        "[training] gpus: the trainer needs 1, and the engines leave 0 of 8 (name a GPU in both sections to share it)",
    ),
    "a count that disagrees": (
        ("engine.gpus=6", "engine.count=3"),
        [host(8)],
        "[engine] count = 3, but gpus make 6; leave one of them out",
    ),
    "ranks that disagree": (
        ("training.gpus=2", "training.ranks=4"),
        [host(8)],
        "[training] ranks = 4, but gpus make 2; leave one of them out",
    ),
    "two ranks on one GPU": (
        ("training.gpus=[0, 0]",),
        [host(8)],
        "[training] gpus: a GPU is named twice; every rank needs its own",
    ),
    "ranks that would share": (
        ("training.gpus=[0, 1]", "engine.gpus=[1, 2]"),
        [host(8)],
        "[engine] gpus: GPU 1 of localhost is a trainer rank's; only a trainer of one rank shares its GPU",
    ),
    "ranks on a single GPU": (("training.ranks=2",), [host(1)], "[training] ranks: there is only one GPU"),
    "engines that cannot be divided": (
        (*VLLM, "engine.gpus=5", "engine.gpus_per_engine=2"),
        [host(8)],
        "[engine] gpus: 5 cannot be divided into engines of gpus_per_engine = 2",
    ),
    "an engine over two hosts": (
        (*VLLM, "engine.gpus=a:1,b:0", "engine.gpus_per_engine=2"),
        [host(2, "a"), host(2, "b")],
        "[engine] gpus: an engine of 2 GPUs would span two hosts",
    ),
    "an unknown host": (
        ("engine.gpus=c:0",),
        [host(2, "a"), host(2, "b")],
        "[engine] gpus: there is no host 'c' (only a, b)",
    ),
    "an index without its host": (
        ("engine.gpus=[0]",),
        [host(2, "a"), host(2, "b")],
        '[engine] gpus: say of which host ("a:0"), because there are several',
    ),
    "ranks on two hosts of a network that others may reach": (
        ("training.ranks=2",),
        [host(0, "a"), host(0, "b")],
        "[cluster] trusted_network: the trainer's ranks would talk over NCCL or gloo between a, b, and that traffic is "
        "neither encrypted nor authenticated; set it to true only if nobody else can reach the network between the "
        "hosts",
    ),
    "words": (
        ("engine.gpus=all",),
        [host(2)],
        '[engine] gpus: \'all\' names no GPU ("0-5", "0,2" or "host:0-3" would)',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_placed_is_refused_in_one_line(name: str) -> None:
    settings, hosts, line = REFUSED[name]
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        place(configured(*settings), hosts)


SEVERAL = {
    "a transport of one host": (
        ("delivery.transport=shm",),
        '[delivery] transport = "shm" stays on one host, and the run has several ("tcp" works)',
    ),
    "a broadcast that strangers could hear": (
        ("delivery.transport=nccl",),
        '[cluster] trusted_network: [delivery] transport = "nccl" would leave the host, and that traffic is neither '
        "encrypted nor authenticated; set it to true only if nobody else can reach the network between the hosts",
    ),
    "ranks that strangers could reach": (
        ("training.ranks=2", "training.checkpoint_directory=/shared"),
        "[cluster] trusted_network: the trainer's ranks would talk over NCCL or gloo between a, b, and that traffic is "
        "neither encrypted nor authenticated; set it to true only if nobody else can reach the network between the "
        "hosts",
    ),
    "ranks that would write checkpoints apart": (
        ("training.ranks=2", "cluster.trusted_network=true"),
        "[training] checkpoint_directory: ranks on several hosts need one that all of them share",
    ),
    "ranks whose disks a URL does not join": (
        ("training.ranks=2", "cluster.trusted_network=true", "training.checkpoint_directory=s3://bucket/x"),
        "[training] checkpoint_directory: ranks on several hosts need a path that all of them share, not a URL",
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_what_cannot_span_several_hosts_is_refused_in_one_line(name: str) -> None:
    settings, line = SEVERAL[name]
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        place_run(configured(*settings), [host(0, "a"), host(0, "b")])


def test_weights_travel_by_tcp_between_hosts() -> None:
    config, placement = place_run(CONFIG, [host(0, "a"), host(0, "b")])
    assert shown(placement) == {"trainer-0": "a", "engine-0": "b"}
    assert config.delivery.transport == "tcp"


def test_the_hosts_that_are_named_are_used_in_their_order() -> None:
    hosts = [Host(name, address=f"10.0.0.{n}") for n, name in enumerate("abc", start=1)]
    _, placement = place_run(configured('cluster.hosts=["c", "10.0.0.2"]'), hosts)
    assert shown(placement) == {"trainer-0": "c", "engine-0": "b"}
    line = "[cluster] hosts: there is no host 'd' (only a (10.0.0.1), b (10.0.0.2), c (10.0.0.3))"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        place_run(configured('cluster.hosts=["d"]'), hosts)


def test_a_worker_moves_to_gpus_that_nobody_uses() -> None:
    hosts = [host(1, "a"), host(4, "b"), host(2, "c")]
    placement = place(configured("engine.gpus=b:0-1", "training.gpus=c:0-1", *TRUSTED), hosts)
    trainer, *others = placement.of("trainer")[:1] + placement.of("engine")
    assert (moved := move(trainer, others, hosts)) is not None
    assert (moved.host, moved.gpus) == ("a", ("0",))
    assert (moved := move(trainer, others, hosts[1:])) is not None
    assert (moved.host, moved.gpus) == ("b", ("2",))
    assert move(trainer, others, hosts[2:]) is None


UNCONNECTED = {
    "GPU memory where there is no GPU": (
        ("delivery.transport=cuda_ipc",),
        host(0),
        '[delivery] transport = "cuda_ipc" needs trainer and engines on GPUs',
    ),
    "GPU memory for engines on CPUs": (
        ("delivery.transport=cuda_ipc", "engine.gpus=0"),
        host(1),
        '[delivery] transport = "cuda_ipc" needs trainer and engines on GPUs',
    ),
    "a broadcast on a shared GPU": (
        ("delivery.transport=nccl",),
        host(1),
        '[delivery] transport = "nccl" needs a GPU for each process, and trainer-0 shares one with engine-0',
    ),
    "a broadcast to two engines of one GPU": (
        ("delivery.transport=nccl", "engine.gpus=[0, 0]", "training.gpus=[1]"),
        host(2),
        '[delivery] transport = "nccl" needs a GPU for each process, and engine-0 shares one with engine-1',
    ),
    "a broadcast from a GPU to CPUs": (
        ("delivery.transport=nccl", "engine.gpus=0"),
        host(1),
        '[delivery] transport = "nccl" needs trainer and engines all on GPUs, or all on CPUs',
    ),
}


@pytest.mark.parametrize("name", UNCONNECTED)
def test_a_transport_that_cannot_connect_the_devices_is_refused_in_one_line(name: str) -> None:
    settings, given, line = UNCONNECTED[name]
    config = configured(*settings)
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        place(config, [given]).applied(config)


def test_servers_that_run_already_may_map_the_trainers_memory() -> None:
    """Nothing is known of their devices, so only the trainer's is checked."""
    urls = ("engine.kind=vllm", 'engine.urls=["http://127.0.0.1:1"]', "delivery.transport=cuda_ipc")
    config = configured(*urls)
    assert place(config, [host(1)]).applied(config).delivery.transport == "cuda_ipc"
    with pytest.raises(ConfigError, match='"cuda_ipc" needs trainer and engines on GPUs'):
        place(config, [host(0)]).applied(config)


@pytest.mark.parametrize("gpus", [0, 2, 4])
def test_a_broadcast_fits_where_all_are_on_cpus_or_on_gpus_of_their_own(gpus: int) -> None:
    config = configured("delivery.transport=nccl")
    assert place(config, [host(gpus)]).applied(config).delivery.transport == "nccl"


@pytest.mark.parametrize(
    ("generation", "training", "ranks"), [(7.0, 1.0, 1), (3.0, 1.0, 2), (1.0, 1.0, 4), (1.0, 3.0, 6), (1.0, 99.0, 7)]
)
def test_the_slower_side_gets_more_gpus(generation: float, training: float, ranks: int) -> None:
    placement = place(CONFIG, [host(8)], lambda: (generation, training))
    assert (len(placement.of("trainer")), len(placement.of("engine"))) == (ranks, 8 - ranks)


@pytest.mark.parametrize(("settings", "ranks"), [((), 8), (TRUSTED, 12)])
def test_an_automatic_trainer_stays_on_one_host_unless_the_network_is_trusted(
    settings: tuple[str, ...], ranks: int
) -> None:
    placement = place(configured(*settings), [host(8, "a"), host(8, "b")], lambda: (1.0, 3.0))
    assert len(placement.of("trainer")) == ranks
    assert len({worker.host for worker in placement.of("trainer")}) == (2 if settings else 1)
    kept = place(configured("engine.gpus=b:0-1", *settings), [host(8, "a"), host(8, "b")])
    assert len(kept.of("trainer")) == (14 if settings else 8)


def test_ranks_know_where_they_meet() -> None:
    hosts = [Host(name, address=f"10.0.0.{number}") for number, name in enumerate("abc", 1)]
    cpu = ("training.ranks=2", *TRUSTED)

    def meeting(hosts: list[Host], *settings: str) -> dict[str, str]:
        return {worker.name: worker.meet_at for worker in place(configured(*settings), hosts).places}

    assert meeting(hosts, *cpu) == {"trainer-0": "10.0.0.1", "trainer-1": "10.0.0.2", "engine-0": ""}
    # On the controller's host they share the run directory, and elsewhere the host.
    assert meeting(hosts[:1], *cpu) == {"trainer-0": "", "trainer-1": "", "engine-0": ""}
    gpus = [msgspec.structs.replace(each, gpus=(Gpu("0"), Gpu("1"))) for each in hosts]
    assert meeting(gpus, "training.gpus=b:0-1", "engine.gpus=a:0") == {
        "trainer-0": "127.0.0.1",
        "trainer-1": "127.0.0.1",
        "engine-0": "",
    }
    assert set(meeting(gpus, "training.gpus=b:0", "engine.gpus=a:0").values()) == {""}


def test_workers_know_who_shares_their_gpu() -> None:
    placement = place(configured("engine.gpus=[0, 0, 1]", "training.gpus=[0]"), [host(2)])
    assert {worker.name: worker.neighbours for worker in placement.places} == {
        "trainer-0": ("engine-0", "engine-1"),
        "engine-0": ("trainer-0", "engine-1"),
        "engine-1": ("trainer-0", "engine-0"),
        "engine-2": (),
    }


def test_a_gpu_with_too_little_memory_is_refused_by_name() -> None:
    hosts = [host(2, memory=80 * GIB)]
    needs = {"trainer": 70 * GIB, "engine": 20 * GIB}
    check_memory(place(CONFIG, hosts), hosts, needs)
    shared = place(configured("engine.gpus=[1]", "training.gpus=[1]"), hosts)
    line = "GPU 1 of localhost has 80.0 GiB of memory: trainer-0 needs 70.0, engine-0 needs 20.0"
    with pytest.raises(ConfigError, match=f"^{re.escape(line)}$"):
        check_memory(shared, hosts, needs)


def test_a_run_that_does_not_fit_is_refused_before_it_starts() -> None:
    with pytest.raises(HeadraceError, match=r"^GPU 0 of localhost has 0\.0 GiB of memory: trainer-0 needs .*engine-0"):
        place_run(configured("model.weights=random"), [host(1, memory=1 << 20)])
    placed, placement = place_run(configured("model.weights=random"), [host(4, memory=80 * GIB)])
    assert placed.engine.count == len(placement.of("engine")) and placed.training.ranks == len(placement.of("trainer"))


PRESENT = [Device(f"GPU-{letter * 4}-1", 80 * GIB) for letter in "abcd"]


@pytest.mark.parametrize(
    ("variable", "ids"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        ("3, 1", ["3", "1"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        ("1,7,2", ["1"]),
        ("GPU-bbbb-1,GPU-dd", ["GPU-bbbb-1", "GPU-dd"]),
        ("MIG-1234", ["MIG-1234"]),
        ("NoDevFiles", []),
    ],
)
def test_what_a_scheduler_has_made_visible_is_respected(variable: str | None, ids: list[str]) -> None:
    found = visible(PRESENT, variable)
    assert [gpu.id for gpu in found] == ids
    assert all(gpu.memory == 80 * GIB for gpu in found if not gpu.id.startswith("MIG"))


def test_indices_count_what_a_scheduler_has_made_visible() -> None:
    given = Host("localhost", visible(PRESENT, "2,GPU-aaaa-1"))
    placement = place(configured("engine.gpus=[1]", "training.gpus=[0]"), [given])
    assert [worker.environment for worker in placement.places] == [
        {"CUDA_VISIBLE_DEVICES": "2"},
        {"CUDA_VISIBLE_DEVICES": "GPU-aaaa-1,2"},
    ]
    assert visible([], "0") == ()


def test_a_configuration_for_gpus_can_be_checked_on_a_host_without(tmp_path: Path) -> None:
    """Memory for a GPU is estimated before one is rented; a run there is refused, which `check` says in its lines."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    (tmp_path / "rewards.py").write_text("def reward(completion, answer):\n    return float(answer in completion)\n")
    settings = {"model": {"path": str(MODEL), "weights": "random"}, "engine": {"device": "cuda"}}
    task = {"kind": "dataset", "path": str(prompts), "reward": f"{tmp_path / 'rewards.py'}:reward"}
    (tmp_path / "run.toml").write_text(tomli_w.dumps({**settings, "task": task}))
    done = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml")])
    assert done.exit_code == 0, done.output
    assert 'places      not on this host: [engine] device = "cuda", but there is no GPU' in done.output.splitlines()


RANGE = "engine.count={least=1, most=3}"


@pytest.mark.parametrize(
    ("settings", "hosts", "expected"),
    [
        ((), [host(0)], "localhost"),
        ((RANGE,), [host(0)], "localhost"),
        (("engine.count=1", "training.ranks=1"), [host(4)], "localhost:1+3"),
        (("engine.count=2", "training.ranks=1", "delivery.transport=tcp"), [host(4)], "localhost:2"),
        (("engine.count=1", "training.ranks=1"), [host(2, "a"), host(2, "b")], "there is no free GPU for one more "),
        (
            ("engine.count=1", "training.ranks=1", "delivery.transport=tcp"),
            [host(2, "a"), host(2, "b")],
            "b:0",
        ),
        (("delivery.transport=tcp",), [host(0, "a"), host(0, "b"), host(0, "c")], "b"),
        ((), [host(2)], "there is no free GPU for one more engine"),
        (("engine.gpus=[0]", "training.gpus=[1]"), [host(4)], "[engine] gpus: there is no place for one more engine"),
    ],
)
def test_one_more_engine_gets_a_place_that_nobody_has(
    settings: tuple[str, ...], hosts: list[Host], expected: str
) -> None:
    config, placement = place_run(configured("model.weights=random", *settings), hosts)
    rank = len(placement.of("engine"))
    try:
        found = one_more(config, rank, placement.places, hosts)
    except UserError as error:
        assert str(error).startswith(expected)
        return
    assert shown(Placement((found,))) == {f"engine-{rank}": expected}
    assert found.neighbours == () and found.threads == config.engine.threads


@pytest.mark.parametrize("more", [(), ("engine.gpus=[0, 1, 2]",), ("engine.gpus=3",)])
def test_a_range_of_engines_has_places_for_the_most(more: tuple[str, ...]) -> None:
    config, placement = place_run(configured("model.weights=random", RANGE, *more), [host(4)])
    assert shown(placement) == workers(trainer="3", engine="0 1 2", maps="3")
    assert (config.engine.processes, config.engine.at_start) == (3, 1)
    with pytest.raises(ConfigError, match=re.escape("[engine] count = 3, but gpus make 2; leave one of them out")):
        place_run(configured("model.weights=random", RANGE, "engine.gpus=[0, 1]"), [host(4)])


JUDGE = ("scorers.j.kind=judge", "scorers.j.model=m", "scorers.j.template={completion}")


@pytest.mark.parametrize(
    ("settings", "hosts", "expected"),
    [
        ((), [host(0)], {**workers(trainer="localhost", engine="localhost"), "scorer-0": "localhost"}),
        ((), [host(2)], {**workers(trainer="1", engine="0", maps="1"), "scorer-0": "localhost"}),
        (("scorers.j.gpus=[0]",), [host(3)], {**workers(trainer="2", engine="1", maps="2"), "scorer-0": "localhost:0"}),
        (("scorers.j.gpus=[0]",), [host(1)], {**workers(trainer="0", engine="0"), "scorer-0": "localhost:0"}),
        (
            ("scorers.j.gpus=[1]", "engine.gpus=[0, 1]", "training.gpus=[2]"),
            [host(3)],
            {**workers(trainer="2", engine="0 1", maps="2"), "scorer-0": "localhost:1"},
        ),
    ],
)
def test_the_model_of_a_scorer_has_its_own_place(
    settings: tuple[str, ...], hosts: list[Host], expected: dict[str, str]
) -> None:
    config = configured(*JUDGE, "scorers.j.threads=3", *settings)
    placement = place(config, hosts)
    assert shown(placement) == expected
    [scorer] = placement.of("scorer")
    assert scorer.threads == 3
    assert set(scorer.neighbours) == {
        name for name, where in expected.items() if scorer.gpus and where.split("+")[0] == expected["scorer-0"]
    } - {"scorer-0"}
    assert placement.applied(config).scorers == config.scorers


def test_the_model_of_a_scorer_has_one_gpu() -> None:
    with pytest.raises(ConfigError, match=r"^\[scorers\.j\] gpus: a scorer's model has one GPU, and 2 are named$"):
        place(configured(*JUDGE, "scorers.j.gpus=[0, 1]"), [host(4)])
    with pytest.raises(ConfigError, match=r"^\[scorers\.j\] gpus: localhost has no GPU 4"):
        place(configured(*JUDGE, "scorers.j.gpus=[4]"), [host(4)])

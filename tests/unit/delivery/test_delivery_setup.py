"""From the configuration to a transport: the choice and its reason, the keys, what a dead run left."""

import stat
from pathlib import Path

import pytest

from headrace.config import make_config
from headrace.config.declared import transport_facts
from headrace.config.schema import DeliveryConfig, names_of
from headrace.delivery import transports
from headrace.delivery.setup import choose, clean, make_sender, prepare, weights_directory
from headrace.errors import ConfigError, DeliveryError
from headrace.training.devices import engine_device


def test_auto_takes_shared_memory_where_there_is_some_and_says_why(tmp_path: Path):
    assert choose(DeliveryConfig(), tmp_path).transport == "shm"
    assert "one host" in choose(DeliveryConfig(), tmp_path).why
    without = choose(DeliveryConfig(), tmp_path / "missing")
    assert without.transport == "tcp"
    assert "missing" in without.why
    assert choose(DeliveryConfig(transport="file"), tmp_path).transport == "file"


def test_auto_takes_cuda_ipc_where_both_sides_are_on_a_gpu(tmp_path: Path):
    both = choose(DeliveryConfig(), tmp_path, trainer="cuda:0", engines="cuda")
    assert (both.transport, both.why) == ("cuda_ipc", "trainer and engines are on GPUs of one host")
    assert choose(DeliveryConfig(), tmp_path, trainer="cuda:0").transport == "shm"
    assert choose(DeliveryConfig(), tmp_path, engines="cuda:0").transport == "shm"
    configured = choose(DeliveryConfig(transport="nccl"), tmp_path, trainer="cuda", engines="cuda")
    assert configured.transport == "nccl"


def test_a_server_on_a_gpu_takes_weights_there_unless_its_device_is_unknown() -> None:
    given = {"model": {"path": "m"}, "task": {"kind": "gym", "name": "x"}}
    started = make_config(given, ["engine.kind=vllm", "engine.python=python", "engine.device=cuda"])
    assert engine_device(started) == "cuda"
    assert engine_device(make_config(given, ["engine.kind=vllm", "engine.python=python", "engine.device=cpu"])) == "cpu"
    attached = make_config(given, ["engine.kind=vllm", 'engine.urls=["http://127.0.0.1:1"]', "engine.device=cuda"])
    assert engine_device(attached) == "cpu"


@pytest.mark.parametrize("bind", ["127.0.0.1", "203.0.113.1"])
def test_keys_are_made_for_the_transport_that_uses_them_and_removed_at_the_end(tmp_path: Path, bind: str):
    prepare(DeliveryConfig(transport="shm"), tmp_path)
    assert list(tmp_path.iterdir()) == []
    config = DeliveryConfig(transport="tcp", bind=bind)
    with pytest.raises(DeliveryError, match=r"delivery\.keys, cannot be read"):
        make_sender(config, tmp_path)
    prepare(config, tmp_path)
    (keys,) = tmp_path.iterdir()
    assert (keys.name, stat.S_IMODE(keys.stat().st_mode)) == ("delivery.keys", 0o600)
    first = keys.read_bytes()
    prepare(config, tmp_path)
    assert keys.read_bytes() != first
    clean(config, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_of_two_runs_in_a_shared_directory_do_not_meet(tmp_path: Path):
    config = DeliveryConfig(transport="file", directory=str(tmp_path / "shared"))
    assert weights_directory(DeliveryConfig(transport="file"), tmp_path / "a") == tmp_path / "a" / "weights"
    one, other = make_sender(config, tmp_path / "a"), make_sender(config, tmp_path / "b")
    clean(config, tmp_path / "a")
    assert weights_directory(config, tmp_path / "a").is_dir()
    one.close()
    assert not weights_directory(config, tmp_path / "a").exists()
    assert weights_directory(config, tmp_path / "b").is_dir()
    other.close()


def test_every_transport_declares_what_others_must_know() -> None:
    facts = {name: transport_facts(name) for name in transports.NAMES}
    assert set(names_of(DeliveryConfig, "transport") or ()) == {"auto", *facts}
    assert tuple(name for name, each in facts.items() if not each.needs_gpu) == transports.WITHOUT_GPU
    assert [name for name, each in facts.items() if not each.crosses_hosts] == ["shm", "cuda_ipc"]
    assert [name for name, each in facts.items() if each.on_device] == ["cuda_ipc", "nccl"]
    assert [name for name, each in facts.items() if each.own_gpus] == ["nccl"]
    assert [name for name, each in facts.items() if not each.for_servers] == []
    assert [name for name, each in facts.items() if not each.for_ranks] == []
    assert [name for name, each in facts.items() if each.uses_directory] == ["file"]
    assert [name for name, each in facts.items() if each.uses_keys] == ["tcp"]
    assert [name for name, each in facts.items() if each.needs_trust] == ["nccl"]


def test_a_sender_without_keys_is_told_whether_the_network_is_trusted(tmp_path: Path) -> None:
    config = DeliveryConfig(transport="nccl", bind="203.0.113.1")
    with pytest.raises(ConfigError, match=r"^\[cluster\] trusted_network: "):
        make_sender(config, tmp_path)
    with pytest.raises(ConfigError, match=r"^\[delivery\] bind: cannot listen on 203\.0\.113\.1"):
        make_sender(config, tmp_path, trusted_network=True)

"""Versions behind fsspec URLs: whole or absent, one run's, swept after a death, and every failure one line."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load

from headrace.config.schema import DeliveryConfig
from headrace.delivery.plan import PackingPlan, plan_weights
from headrace.delivery.setup import clean, make_sender, prepare, weights_directory
from headrace.delivery.transports.file import FileSender, FileSource
from headrace.delivery.transports.storage import owner_of, sweep_storage
from headrace.errors import ConfigError, DeliveryError

BUCKET = f"memory://object-store-test-{os.getpid()}"
URL = f"{BUCKET}/weights"
STORE = fsspec.filesystem("memory")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    left = STORE.find(BUCKET)
    for path in left:
        STORE.rm_file(path)
    assert left == []


@pytest.fixture
def sender() -> Iterator[FileSender]:
    made = FileSender(URL, keep=2, owner="host:run")
    yield made
    made.close()


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": torch.randn(70, 3, generator=generator), "b": torch.randn(5, generator=generator)}


def written(sender: FileSender, version: int) -> tuple[str, PackingPlan]:
    plan = plan_weights(weights_of(version), "bfloat16")
    location = sender.write(version, plan, weights_of(version))
    sender.finish(location)
    return location, plan


def names(url: str = URL) -> list[str]:
    return sorted(path.rsplit("/", 1)[1] for path in STORE.find(url))


def test_any_safetensors_reader_takes_the_object(sender: FileSender):
    location, _ = written(sender, 3)
    assert location == f"{URL}/version-00000003.safetensors"
    found = load(STORE.cat_file(location))
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in weights_of(3).items())


def test_the_newest_stay_and_so_does_what_is_not_acknowledged(sender: FileSender):
    held, _ = written(sender, 1)
    for version in range(2, 7):
        location, _ = written(sender, version)
        sender.release(location)
    kept = [f"version-0000000{version}.safetensors" for version in (1, 5, 6)]
    assert names() == [*kept, "writer.json"]
    sender.release(held)
    written(sender, 7)
    assert names() == ["version-00000006.safetensors", "version-00000007.safetensors", "writer.json"]


def test_damage_and_a_change_while_it_is_read_are_named(sender: FileSender):
    location, plan = written(sender, 1)
    good = STORE.cat_file(location)
    source = FileSource()

    def refused(content: bytes, version: int = 1) -> str:
        STORE.pipe_file(location, content)
        with pytest.raises(DeliveryError) as caught:
            source.open(location, version, plan.entries)
        return str(caught.value)

    assert f"has {len(good) - 1} bytes, not {len(good)}" in refused(good[:-1])
    assert "holds version 1, not 2" in refused(good, version=2)
    STORE.pipe_file(location, good)
    source.open(location, 1, plan.entries)
    source.verify(location, 1)
    STORE.pipe_file(location, good)
    with pytest.raises(DeliveryError, match="was changed while it was read"):
        source.verify(location, 1)
    source.open(location, 1, plan.entries)
    STORE.rm_file(location)
    with pytest.raises(DeliveryError, match="was removed while it was read"):
        source.verify(location, 1)
    with pytest.raises(DeliveryError, match="cannot be read"):
        source.open(location, 1, plan.entries)


def test_what_a_store_does_to_the_bytes_is_not_what_was_published(sender: FileSender):
    location, plan = written(sender, 1)
    content = bytearray(STORE.cat_file(location))
    content[-1] ^= 1
    STORE.pipe_file(location, bytes(content))
    published = sender.snapshot(location, plan)
    assert all(torch.equal(published[name], tensor.bfloat16()) for name, tensor in weights_of(1).items())
    arrived = FileSource().open(location, 1, plan.entries)
    assert not all(torch.equal(arrived[name], published[name]) for name in published)


def test_an_upload_that_breaks_leaves_nothing(sender: FileSender, monkeypatch: pytest.MonkeyPatch):
    plan = plan_weights(weights_of(1), "bfloat16")
    location = sender.write(1, plan, weights_of(1))

    def broken(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(type(STORE), "mv", broken)
        with pytest.raises(DeliveryError, match=r"version-00000001\.safetensors cannot be written: Permission denied$"):
            sender.finish(location)
    assert names() == ["writer.json"]


def test_a_delete_that_fails_is_made_up_for(sender: FileSender, monkeypatch: pytest.MonkeyPatch):
    delete = type(STORE).rm_file

    def broken(store: fsspec.AbstractFileSystem, path: str) -> None:
        if path.endswith(".safetensors"):
            raise OSError("busy")
        delete(store, path)

    for version in range(1, 4):
        with monkeypatch.context() as patch:
            patch.setattr(type(STORE), "rm_file", broken)
            sender.release(written(sender, version)[0])
    assert len(names()) == 4
    sender.release(written(sender, 4)[0])
    assert names() == ["version-00000003.safetensors", "version-00000004.safetensors", "writer.json"]


def test_another_run_is_refused_and_a_replaced_trainer_writes_nothing(sender: FileSender):
    written(sender, 1)
    with pytest.raises(DeliveryError, match=r"^host:run publishes weights in .* remove .*/writer\.json$"):
        FileSender(URL, owner="elsewhere:run")
    assert not sweep_storage(URL, "elsewhere:run")
    assert names() == ["version-00000001.safetensors", "writer.json"]
    successor = FileSender(URL, owner="host:run")
    plan = plan_weights(weights_of(2), "bfloat16")
    location = sender.write(2, plan, weights_of(2))
    with pytest.raises(DeliveryError, match="another trainer publishes weights in"):
        sender.finish(location)
    kept, _ = written(successor, 3)
    sender.close()
    assert STORE.exists(kept)
    successor.close()


def test_a_sweep_takes_what_a_dead_trainer_of_the_run_left_and_spares_strangers():
    dead = FileSender(URL, owner="host:run")
    written(dead, 1)
    STORE.pipe_file(f"{URL}/version-00000002.safetensors.partial", b"half")
    STORE.pipe_file(f"{URL}/notes.txt", b"mine")
    assert sweep_storage(URL, "host:run")
    assert names() == ["notes.txt"]
    assert not sweep_storage(URL, "host:run")
    STORE.rm_file(f"{URL}/notes.txt")


@pytest.mark.parametrize(("url", "why"), [("s3://bucket/x", "s3fs"), ("pigeon://coop", "pigeon")])
def test_a_store_that_cannot_be_reached_is_one_line(
    url: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    config = DeliveryConfig(transport="file", directory=url)
    with pytest.raises(ConfigError, match=rf"^\[delivery\] directory: {url}/run cannot be used: .*{why}.*$") as caught:
        prepare(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    clean(config, tmp_path / "run")
    prepare(DeliveryConfig(transport="shm", directory=url), tmp_path / "run")
    with pytest.raises(DeliveryError, match=why):
        FileSource().open(f"{url}/version-00000001.safetensors", 1, plan_weights(weights_of(1), "float32").entries)


def test_errors_of_a_store_s_own_library_are_one_line(sender: FileSender, monkeypatch: pytest.MonkeyPatch):
    class Library:
        class BotoCoreError(Exception):
            pass

    def broken(*_: object, **__: object) -> None:
        raise Library.BotoCoreError("Unable to locate\ncredentials")

    location, plan = written(sender, 1)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "botocore.exceptions", Library)
        patch.setattr(type(STORE), "info", broken)
        with pytest.raises(DeliveryError, match=r"cannot be read: Unable to locate credentials$"):
            FileSource().open(location, 1, plan.entries)


def test_the_configuration_leads_to_the_store_and_back(tmp_path: Path):
    config = DeliveryConfig(transport="file", directory=f"{BUCKET}/shared/")
    assert weights_directory(config, tmp_path / "a") == f"{BUCKET}/shared/a"
    prepare(config, tmp_path / "a")
    one, other = make_sender(config, tmp_path / "a"), make_sender(config, tmp_path / "b")
    assert isinstance(one, FileSender)
    location, _ = written(one, 1)
    clean(config, tmp_path / "b")
    assert STORE.exists(location)
    clean(config, tmp_path / "a")
    assert not STORE.exists(location)
    one.close()
    other.close()


def test_the_owner_is_the_run_on_its_host(tmp_path: Path):
    assert owner_of(tmp_path) != owner_of(tmp_path / "other")
    assert owner_of(tmp_path).endswith(f":{tmp_path}")

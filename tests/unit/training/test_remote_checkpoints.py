"""Checkpoints behind a URL: complete or not there, the newest kept, and none used that is damaged or ahead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.config import Config, make_config
from headrace.config.file_digests import SUMS, write_digests
from headrace.errors import ConfigError, UserError
from headrace.training.checkpoints import base
from headrace.training.checkpoints.base import TrainerState, damage_of, latest, prune, set_aside
from headrace.training.checkpoints.remote_store import RemoteStore, check_store, fetch_missing, store_of

MEMORY = fsspec.filesystem("memory")


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/bucket"
        return
    found = f"memory://checkpoints-test-{os.getpid()}"
    yield found
    if MEMORY.exists(found):
        MEMORY.rm(found, recursive=True)


@pytest.fixture
def store(url: str) -> RemoteStore:
    return RemoteStore(url, "run")


def write(directory: Path, steps: int, policy_steps: int | None = None, content: float = 1.0) -> Path:
    state = TrainerState(steps_done=steps, policy_steps=steps if policy_steps is None else policy_steps)
    partial = base.partial_path(directory, state)
    base.begin_checkpoint(partial)
    save_file({"w": np.full(4, content, np.float32)}, partial / "model.safetensors")
    save_file({"m": np.full(4, steps, np.float32)}, partial / "trainer" / "optimizer.safetensors")
    return base.finish_checkpoint(partial, state)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def files(store: RemoteStore) -> dict[str, bytes]:
    found, root = fsspec.url_to_fs(store.url)
    return {str(path).removeprefix(f"{root}/"): found.cat_file(path) for path in found.find(root)}


def change(store: RemoteStore, name: str, content: bytes | None) -> None:
    """Put other bytes behind the URL, or remove the file."""
    found, root = fsspec.url_to_fs(store.url)
    if content is None:
        found.rm_file(f"{root}/{name}")
    else:
        found.pipe_file(f"{root}/{name}", content)


def test_a_checkpoint_comes_back_in_an_empty_directory_byte_for_byte(tmp_path: Path, store: RemoteStore) -> None:
    saved = write(tmp_path / "here", 42)
    assert store.names() == []
    store.keep(saved, 2)
    assert store.names() == ["step-00000042"]
    assert store.fetch_newest(tmp_path / "there", 42) == []
    fetched = latest(tmp_path / "there")
    assert fetched is not None and damage_of(fetched) == "" and names(tmp_path / "there") == [saved.name]
    same = {path.relative_to(saved): path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    assert {path.relative_to(fetched): path.read_bytes() for path in fetched.rglob("*") if path.is_file()} == same
    assert files(store) == {f"{saved.name}/{path.as_posix()}": content for path, content in same.items()}


def test_the_newest_are_kept_by_the_same_rule_as_on_the_disk(tmp_path: Path, store: RemoteStore) -> None:
    for steps in range(1, 6):
        store.keep(write(tmp_path / "here", steps), 2)
        prune(tmp_path / "here", 2)
        assert store.names() == names(tmp_path / "here")
    assert {name.split("/")[0] for name in files(store)} == {"step-00000004", "step-00000005"}


def test_what_is_there_already_is_not_copied_again(
    tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last checkpoint of a run may be written twice. At no moment is there none."""
    saved = write(tmp_path / "here", 1)
    store.keep(saved, 1)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was copied again")

    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.url_to_fs(store.url)[0]), "put_file", never)
        store.keep(write(tmp_path / "here", 1), 1)
    store.keep(write(tmp_path / "here", 1, content=2.0), 1)
    store.fetch("", tmp_path / "there")
    assert (tmp_path / "there" / saved.name / SUMS).read_bytes() == (saved / SUMS).read_bytes()


def test_a_torn_upload_is_ignored_and_made_up_for(
    tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.keep(write(tmp_path / "here", 1), 2)
    newer = write(tmp_path / "here", 2)
    kind = type(fsspec.url_to_fs(store.url)[0])
    put = kind.put_file

    def torn(self: fsspec.AbstractFileSystem, source: str, target: str, **options: object) -> None:
        if source.endswith(SUMS):
            raise PermissionError(13, "Permission denied")
        put(self, source, target, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "put_file", torn)
        with pytest.raises(UserError, match=r"step-00000002 cannot be copied to .*/run: Permission denied$"):
            store.keep(newer, 2)
    assert any(name.startswith("step-00000002/") for name in files(store))
    assert store.names() == ["step-00000001"]
    assert store.fetch_newest(tmp_path / "there", 9) == []
    assert names(tmp_path / "there") == ["step-00000001"]
    store.keep(write(tmp_path / "here", 3), 2)
    assert {name.split("/")[0] for name in files(store)} == {"step-00000001", "step-00000003"}


def test_a_deletion_that_breaks_leaves_no_half_checkpoint(
    tmp_path: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.keep(write(tmp_path / "here", 1), 1)
    newer = write(tmp_path / "here", 2)
    kind = type(fsspec.url_to_fs(store.url)[0])
    remove = kind.rm

    def broken(self: fsspec.AbstractFileSystem, path: str, **options: bool) -> None:
        if path.endswith("step-00000001"):
            raise OSError("busy")
        remove(self, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "rm", broken)
        with pytest.raises(UserError, match="busy"):
            store.keep(newer, 1)
    assert {name.split("/")[0] for name in files(store)} == {"step-00000001", "step-00000002"}
    assert store.names() == ["step-00000002"]
    store.keep(newer, 1)
    assert {name.split("/")[0] for name in files(store)} == {"step-00000002"}


@pytest.mark.parametrize(
    ("file", "content", "damage"),
    [
        ("model.safetensors", b"other", "model.safetensors"),
        ("model.safetensors", None, "model.safetensors is missing"),
        ("trainer/state.json", b"{", "trainer/state.json has other bytes than were written"),
        (SUMS, b"nonsense", "SHA256SUMS is damaged"),
        (SUMS, b"0" * 64 + b"  ../../escaped\n", "SHA256SUMS is damaged"),
    ],
)
def test_a_damaged_one_is_refused_and_the_one_before_it_used(
    tmp_path: Path, store: RemoteStore, file: str, content: bytes | None, damage: str
) -> None:
    store.keep(write(tmp_path / "here", 1), 2)
    store.keep(write(tmp_path / "here", 2), 2)
    change(store, f"step-00000002/{file}", content)
    with pytest.raises(UserError, match=r"/run/step-00000002 is damaged: "):
        store.fetch("step-2", tmp_path / "there")
    assert names(tmp_path / "there") == []
    (said,) = store.fetch_newest(tmp_path / "there", 9)
    assert said.startswith(f"{store.url}/step-00000002: ") and said.endswith("; it is not used") and damage in said
    assert names(tmp_path / "there") == ["step-00000001"] == store.names()
    store.keep(tmp_path / "there" / "step-00000001", 2)
    assert "step-00000002/SHA256SUMS.damaged" in files(store)
    store.keep(write(tmp_path / "there", 2), 2)
    assert store.names() == ["step-00000001", "step-00000002"]
    assert store.fetch_newest(tmp_path / "again", 9) == [] and names(tmp_path / "again") == ["step-00000002"]


def test_only_steps_that_the_journal_knows_are_fetched(tmp_path: Path, store: RemoteStore) -> None:
    store.keep(write(tmp_path / "here", 12, policy_steps=10), 3)
    store.keep(write(tmp_path / "here", 14, policy_steps=12), 3)
    assert store.fetch_newest(tmp_path / "new", None) == []
    assert names(tmp_path / "new") == []
    assert store.fetch_newest(tmp_path / "there", 11) == [
        f"{store.url}/step-00000014: it is of step 12, and the journal ends at step 11; it is not used"
    ]
    assert names(tmp_path / "there") == ["step-00000012"]
    assert store.fetch_newest(tmp_path / "later", 99) == []
    assert names(tmp_path / "later") == ["step-00000012"], "it stays unused when the journal has grown"
    store.keep(write(tmp_path / "there", 13, policy_steps=11), 3)
    assert "step-00000014/SHA256SUMS.ahead" in files(store)
    store.keep(write(tmp_path / "there", 14, policy_steps=12, content=2.0), 3)
    assert store.names() == ["step-00000012", "step-00000013", "step-00000014"]
    assert "step-00000014/SHA256SUMS.ahead" not in files(store)


def test_only_what_is_missing_is_fetched(tmp_path: Path, store: RemoteStore) -> None:
    for steps in (1, 2):
        store.keep(write(tmp_path, steps), 2)
    unsent = write(tmp_path, 3)
    assert store.fetch_newest(tmp_path, 3) == []
    assert latest(tmp_path) == unsent
    (tmp_path / "step-00000002" / "model.safetensors").write_bytes(b"x" * 80)
    assert store.fetch_newest(tmp_path, 2) == [] and latest(tmp_path) == unsent
    assert len(set_aside(tmp_path, 2)) == 2 and latest(tmp_path) == tmp_path / "step-00000001"
    assert store.fetch_newest(tmp_path, 2) == []
    assert latest(tmp_path) == tmp_path / "step-00000002" and damage_of(tmp_path / "step-00000002") == ""


def test_a_base_model_beside_adapters_travels_once(tmp_path: Path, store: RemoteStore) -> None:
    (tmp_path / "here" / "base").mkdir(parents=True)
    (tmp_path / "here" / "base" / "model.safetensors").write_text("drawn at random")
    write_digests(tmp_path / "here" / "base")
    store.keep(write(tmp_path / "here", 1), 1)
    store.keep(write(tmp_path / "here", 2), 1)
    assert store.names() == ["step-00000002"]
    assert store.fetch_newest(tmp_path / "there", 2) == []
    assert names(tmp_path / "there") == ["base", "step-00000002"]
    assert (tmp_path / "there" / "base" / "model.safetensors").read_text() == "drawn at random"
    change(store, "base/model.safetensors", b"other")
    with pytest.raises(UserError, match=r"/run/base is damaged: model\.safetensors has other bytes than were written"):
        store.fetch("step-2", tmp_path / "again")
    (said,) = store.fetch_newest(tmp_path / "again", 2)
    assert said.startswith(f"{store.url}/base: model.safetensors has other bytes")
    assert names(tmp_path / "again") == ["step-00000002"]
    store.keep(tmp_path / "here" / "step-00000002", 1)
    assert store.fetch_newest(tmp_path / "then", 2) == [] and names(tmp_path / "then") == ["base", "step-00000002"]


def configured(url: str) -> Config:
    return make_config(
        {
            "run": {"name": "run"},
            "model": {"path": "model"},
            "task": {"kind": "dataset", "path": "prompts.jsonl", "reward": "rewards:reward"},
            "training": {"checkpoint_directory": url},
        }
    )


def test_commands_fetch_what_they_need(tmp_path: Path) -> None:
    config = configured(f"file://{tmp_path}/bucket/")
    store = store_of(config)
    assert store is not None and store.url == f"file://{tmp_path}/bucket/run"
    for steps in (1, 2):
        store.keep(write(tmp_path / "trainer", steps), 2)
    there = tmp_path / "there"
    with pytest.raises(
        UserError, match=r"/run has no complete checkpoint step-3; there are step-00000001, step-00000002$"
    ):
        fetch_missing(config, there, "step-3")
    fetch_missing(config, there, "step-1")
    assert names(there) == ["step-00000001"]
    fetch_missing(config, there)
    assert names(there) == ["step-00000001", "step-00000002"]
    (tmp_path / "bucket").rename(tmp_path / "gone")
    (tmp_path / "bucket").write_text("not a directory")
    fetch_missing(config, there, "step-1")
    with pytest.raises(UserError, match=r"^\[training\] checkpoint_directory: file://.*/run cannot be read: \S"):
        fetch_missing(config, there)
    fetch_missing(configured(str(tmp_path)), there, "step-7")
    assert store_of(configured("")) is None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://bucket/x", "s3fs"),
        ("pigeon://coop", "pigeon"),
        ("memory://x", "is the memory of one process"),
        ("file:///proc/nowhere", "No such file or directory"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_line(url: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=rf"^\[training\] checkpoint_directory: {url}.*{why}") as caught:
        check_store(configured(url))
    assert "\n" not in str(caught.value)


def test_a_new_run_is_refused_where_another_one_has_checkpoints(tmp_path: Path) -> None:
    config = configured(f"file://{tmp_path}/bucket")
    check_store(config, new=True)
    assert names(tmp_path / "bucket") == [], "the check leaves nothing"
    store = store_of(config)
    assert store is not None
    store.keep(write(tmp_path / "here", 1), 1)
    check_store(config)
    with pytest.raises(UserError, match=r"^\[run\] name: file://.*/bucket/run has checkpoints already; choose another"):
        check_store(config, new=True)

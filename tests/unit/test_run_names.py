"""A run without a name gets the next free one, and an old run is replaced only by one whose input is right."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec import structs

from headrace.config import Config, make_config
from headrace.errors import UserError
from headrace.run_dir import RunDir, with_name


def configured(directory: Path, name: str = "") -> Config:
    task = {"kind": "dataset", "path": "p.jsonl", "reward": "m:f"}
    return make_config({"run": {"directory": str(directory), "name": name}, "model": {"path": "m"}, "task": task})


def test_friction_16_runs_without_a_name_are_numbered(tmp_path: Path) -> None:
    for expected in ("run", "run-2", "run-3"):
        config = with_name(configured(tmp_path))
        assert config.run.name == expected
        assert RunDir.create(config).path == tmp_path / expected
    assert with_name(configured(tmp_path), existing=True).run.name == "run-3"
    assert with_name(configured(tmp_path / "new"), existing=True).run.name == "run"


def test_a_name_that_is_given_is_not_changed(tmp_path: Path) -> None:
    config = configured(tmp_path, "mine")
    assert with_name(config) == config
    RunDir.create(config)
    assert with_name(config) == config
    with pytest.raises(UserError, match=r"mine exists: .* --overwrite"):
        RunDir.create(config)


@pytest.mark.parametrize("right", [True, False])
def test_an_old_run_is_removed_for_good_or_put_back(tmp_path: Path, right: bool) -> None:
    config = configured(tmp_path, "mine")
    old = RunDir.create(config)
    (old.path / "old.txt").write_text("old")
    with old.set_aside() as remove:
        assert not old.path.exists()
        RunDir.create(config)
        if right:
            remove()
    assert (old.path / "old.txt").exists() == (not right)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_checkpoints_elsewhere_are_removed_with_their_run(tmp_path: Path) -> None:
    config = configured(tmp_path, "mine")
    old = RunDir.create(config)
    (tmp_path / "store" / "step-1").mkdir(parents=True)
    old.checkpoints.symlink_to(tmp_path / "store")
    with old.set_aside() as remove:
        remove()
    assert list((tmp_path / "store").iterdir()) == []


def test_a_directory_that_is_no_run_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="is not a run directory"), RunDir.of(configured(tmp_path, "mine")).set_aside():
        pass
    assert (tmp_path / "mine").is_dir()


def test_the_newest_run_is_found_though_one_before_it_was_deleted(tmp_path: Path) -> None:
    for _ in range(3):
        RunDir.create(with_name(configured(tmp_path)))
    for gone in ("run-2", "run"):
        shutil.rmtree(tmp_path / gone)
        assert with_name(configured(tmp_path), existing=True).run.name == "run-3"
        assert with_name(configured(tmp_path)).run.name == "run-4"
    (tmp_path / "run-old").mkdir()
    (tmp_path / "running").mkdir()
    assert with_name(configured(tmp_path)).run.name == "run-4"


def test_a_run_that_is_created_at_the_same_time_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunDir.create(configured(tmp_path, "mine"))
    monkeypatch.setattr(Path, "exists", lambda path: False)  # The other run began after this run had looked.
    with pytest.raises(UserError, match="mine exists"):
        RunDir.create(configured(tmp_path, "mine"))
    assert first.config.is_file()


def test_workers_of_a_host_may_link_the_checkpoints_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, "mine")
    config = structs.replace(
        config, training=structs.replace(config.training, checkpoint_directory=str(tmp_path / "store"))
    )
    run_dir = RunDir.create(config)
    monkeypatch.setattr(Path, "is_symlink", lambda path: False)  # The other worker made it after this one had looked.
    run_dir.link_checkpoints(config)
    assert run_dir.checkpoints.resolve() == tmp_path / "store/mine"

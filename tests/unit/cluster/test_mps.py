"""NVIDIA's daemon for a run: it ends with the run or at the next start, and where there is none workers take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.cluster.mps import CONTROL, PREFIX, Mps, sweep_daemons, without_mps
from headrace.config import Config, load_config

QUICKSTART = Path(__file__).parents[3] / "examples/quickstart/quickstart.toml"
SCRIPT = """#!/bin/sh
echo "$CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY $* $(cat)" >> "{log}"
{then}
"""
OWNER = """
import sys
from headrace.cluster.mps import Mps
from headrace.config import load_config
mps = Mps(load_config(sys.argv[1], ["pipeline.one_gpu=mps"]))
print(mps.environment["CUDA_MPS_PIPE_DIRECTORY"], flush=True)
input()
"""


class Control:
    """A script in the place of NVIDIA's, and what it was asked to do."""

    def __init__(self, directory: Path) -> None:
        self.path, self._log = directory / "bin" / CONTROL, directory / "asked"
        self.path.parent.mkdir()
        self.then("exit 0")

    def then(self, line: str) -> None:
        self.path.write_text(SCRIPT.format(log=self._log, then=line))
        self.path.chmod(0o755)

    @property
    def asked(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories of daemons are made, for this test alone."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "tmp"


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Control:
    made = Control(tmp_path)
    monkeypatch.setenv("PATH", f"{made.path.parent}{os.pathsep}{os.environ['PATH']}")
    return made


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)


def asks_for(mode: str) -> Config:
    return load_config(QUICKSTART, [f"pipeline.one_gpu={mode}"])


def test_a_daemon_begins_and_ends_with_its_run(control: Control, temporary: Path) -> None:
    mps = Mps(asks_for("mps"))
    assert mps.missing == ""
    (directory,) = temporary.iterdir()
    assert directory.name.startswith(PREFIX)
    assert mps.environment == {
        "CUDA_MPS_PIPE_DIRECTORY": str(directory),
        "CUDA_MPS_LOG_DIRECTORY": str(directory),
    }
    mps.stop()
    mps.stop()
    assert control.asked == [f"{directory} {directory} -d ", f"{directory} {directory}  quit"]
    assert list(temporary.iterdir()) == []
    assert without_mps(asks_for("mps"), {}).pipeline.one_gpu == "mps"


def test_a_daemon_that_does_not_start_leaves_turns_and_a_reason(control: Control, temporary: Path) -> None:
    control.then("echo 'no GPU, no daemon' >&2; exit 1")
    mps = Mps(asks_for("mps"))
    assert mps.missing == "its daemon does not start: no GPU, no daemon"
    assert list(temporary.iterdir()) == []
    config = without_mps(asks_for("mps"), mps.environment)
    assert config.pipeline.one_gpu == "turns"


@pytest.mark.usefixtures("missing")
def test_without_the_program_workers_take_turns() -> None:
    mps = Mps(asks_for("mps"))
    assert mps.missing == f"{CONTROL} is not installed here"
    assert without_mps(asks_for("mps"), mps.environment).pipeline.one_gpu == "turns"
    mps.stop()


@pytest.mark.parametrize("mode", ["turns", "slices"])
def test_who_does_not_ask_gets_none(control: Control, mode: str) -> None:
    mps = Mps(asks_for(mode))
    assert mps.missing == "" and mps.environment == {} and control.asked == []
    assert without_mps(asks_for(mode), os.environ).pipeline.one_gpu == mode


def test_the_daemon_of_a_killed_owner_is_ended_by_the_next(control: Control, temporary: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(QUICKSTART)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    directory = owner.stdout.readline().strip()
    assert sweep_daemons() == [] and len(control.asked) == 1, "its owner lives"
    owner.kill()
    owner.communicate()
    assert sweep_daemons() == [Path(directory).name]
    assert control.asked[1:] == [f"{directory} {directory}  quit"]
    assert list(temporary.iterdir()) == []


def test_a_daemon_that_does_not_answer_is_tried_again(
    control: Control, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = temporary / f"{PREFIX}left"
    left.mkdir()
    control.then("sleep 5")
    monkeypatch.setattr("headrace.cluster.mps.SECONDS", 0.2)
    assert sweep_daemons() == [] and left.is_dir()
    control.then("exit 1")
    assert sweep_daemons() == [left.name], "it is gone"

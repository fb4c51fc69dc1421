"""`[pipeline] one_gpu = "mps"`: a run has its daemon while it lives, or goes on without one and says so."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, small_settings

from headrace.cluster.mps import CONTROL

SCRIPT = """#!/bin/sh
echo "$CUDA_MPS_PIPE_DIRECTORY $* $(cat)" >> "{log}"
"""


def train(directory: Path) -> tuple[str, str | None]:
    """What the run printed, and why its summary says that there was no daemon."""
    mine = ["run.versions=1", "evaluate.prompts=0", "observe.display=plain", "pipeline.one_gpu=mps"]
    done = headrace("train", str(QUICKSTART), *(p for s in small_settings(directory, *mine) for p in ("--set", s)))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((directory / "run" / "summary.json").read_text())["no_mps"]


def test_a_run_ends_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control, log = tmp_path / CONTROL, tmp_path / "asked"
    control.write_text(SCRIPT.format(log=log))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    said, no_mps = train(tmp_path)
    assert "one_gpu" not in said and no_mps is None
    directory = log.read_text().split()[0]
    assert log.read_text().splitlines() == [f"{directory} -d ", f"{directory}  quit"]
    assert not Path(directory).exists()


def test_a_run_without_a_daemon_takes_turns_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said, no_mps = train(tmp_path)
    assert no_mps == f"{CONTROL} is not installed here"
    assert f'[pipeline] one_gpu = "mps": {no_mps}; trainer and engines take turns instead' in " ".join(said.split())

"""Scorers that take longer than anything else in a run may, or for ever."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from runs import QUICKSTART, headrace, small_settings, start

from headrace import Run

STALL_SECONDS = 4
SLOW = """
import time

time.sleep(7)
print(1)
"""
NEVER = """
import asyncio
import pathlib

from headrace.scoring import base
from headrace.types import Score

base.RELEASE_SECONDS = 1.0


class NeverAnswers(base.Scorer):
    keeps_deadlines = True

    async def score(self, ended):
        await asyncio.Event().wait()


class NeverCloses(base.Scorer):
    async def score(self, ended):
        return [Score(value=1.0)]

    async def close(self):
        await asyncio.Event().wait()


class RaisesAtItsEnd(base.Scorer):
    async def score(self, ended):
        return [Score(value=1.0)]

    async def close(self):
        raise KeyError("gone")


class ClosesSlowly(base.Scorer):
    def __init__(self, closing):
        self.closing = pathlib.Path(closing)

    async def score(self, ended):
        return [Score(value=1.0)]

    async def close(self):
        base.RELEASE_SECONDS = 30.0
        self.closing.touch()
        await asyncio.sleep(3)
"""


def arguments(directory: Path, *more: str, **scorer: Any) -> list[str]:
    settings = [f"scorers.slow.{key}={json.dumps(value)}" for key, value in scorer.items()]
    settings += [f"pipeline.stall_seconds={STALL_SECONDS}", "run.versions=1", "buffer.depth=0", "evaluate.prompts=0"]
    given = small_settings(directory, *settings, "observe.display=plain", *more)
    return ["train", str(QUICKSTART), *(part for each in given for part in ("--set", each))]


def train(directory: Path, *more: str, **scorer: Any) -> subprocess.CompletedProcess[str]:
    """Train one version with this scorer."""
    return headrace(*arguments(directory, *more, **scorer), timeout=60)


def test_a_question_within_its_limits_is_no_stall(tmp_path: Path) -> None:
    """Nothing else moves while all answers are judged, for longer than `stall_seconds`."""
    (tmp_path / "slow.py").write_text(SLOW)
    command = ["python3", "-I", str(tmp_path / "slow.py")]
    done = train(tmp_path, kind="program", command=command, concurrency=64)
    assert done.returncode == 0, done.stderr
    assert all(rollout.reward is not None for rollout in Run(tmp_path / "run").rollouts("state = 'trained'"))


def test_a_scorer_that_never_answers_is_a_stall_after_its_limits(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text(NEVER)
    done = train(tmp_path, "scoring.timeout=3", scorer=f"{tmp_path / 'never.py'}:NeverAnswers")
    assert done.returncode == 1, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "no progress for" in line]
    told = line.partition("questions wait for an answer of the scorer 'slow', since ")[2]
    assert int(told.removesuffix(" s")) >= 3 + STALL_SECONDS, line


def test_a_scorer_that_never_closes_is_named_and_the_run_ends_in_order(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text(NEVER)
    done = train(tmp_path, scorer=f"{tmp_path / 'never.py'}:NeverCloses")
    assert done.returncode == 0, done.stderr
    assert "the scorer 'slow' did not close within 1 s; the run ends without it" in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "finished"


def test_a_scorer_that_raises_when_it_is_closed_leaves_the_records_of_the_run_whole(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text(NEVER)
    done = train(tmp_path, scorer=f"{tmp_path / 'never.py'}:RaisesAtItsEnd")
    assert done.returncode == 0, done.stderr
    assert "could not be closed: KeyError: 'gone' (never.py, line " in done.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "finished"
    assert not (tmp_path / "run" / "status.json").exists()


def test_ctrl_c_does_not_disturb_the_end_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "never.py").write_text(NEVER)
    closing = tmp_path / "closing"
    slowly = {"scorer": f"{tmp_path / 'never.py'}:ClosesSlowly", "config.closing": str(closing)}
    run = start(*arguments(tmp_path, **slowly))
    try:
        while not closing.exists() and run.poll() is None:
            time.sleep(0.05)
        for _ in range(2):
            run.send_signal(signal.SIGINT)
            time.sleep(0.2)
        stdout, stderr = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 0, stderr
    assert "the run is ending already" in stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["outcome"] == "finished"

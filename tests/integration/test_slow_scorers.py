"""Scorers that take longer than anything else in a run may, or for ever."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from runs import QUICKSTART, headrace, small_settings

from headrace import Run

STALL_SECONDS = 4
SLOW = """
import time

time.sleep(7)
print(1)
"""
NEVER = """
import asyncio

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
"""


def train(directory: Path, *more: str, **scorer: Any) -> subprocess.CompletedProcess[str]:
    """Train one version with this scorer."""
    settings = [f"scorers.slow.{key}={json.dumps(value)}" for key, value in scorer.items()]
    settings += [f"pipeline.stall_seconds={STALL_SECONDS}", "run.versions=1", "buffer.depth=0", "evaluate.prompts=0"]
    given = small_settings(directory, *settings, "observe.display=plain", *more)
    return headrace("train", str(QUICKSTART), *(part for each in given for part in ("--set", each)), timeout=60)


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

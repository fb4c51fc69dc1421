"""Scorers that take longer than anything else in a run may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, small_settings

from headrace import Run

SLOW = """
import time

time.sleep(7)
print(1)
"""


@pytest.mark.slow
def test_a_question_within_its_limits_is_no_stall(tmp_path: Path) -> None:
    """Nothing else moves while all answers are judged, for longer than `stall_seconds`."""
    (tmp_path / "slow.py").write_text(SLOW)
    program = {"kind": "program", "command": ["python3", "-I", str(tmp_path / "slow.py")], "concurrency": 64}
    settings = [f"scorers.slow.{key}={json.dumps(value)}" for key, value in program.items()]
    settings += ["pipeline.stall_seconds=4", "run.versions=1", "buffer.depth=0", "evaluate.prompts=0"]
    given = small_settings(tmp_path, *settings)
    done = headrace("train", str(QUICKSTART), *(part for each in given for part in ("--set", each)))
    assert done.returncode == 0, done.stderr
    assert all(rollout.reward is not None for rollout in Run(tmp_path / "run").rollouts("state = 'trained'"))

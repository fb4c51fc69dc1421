"""`headrace train --resume` begins a run, and goes on with a run that exists."""

from __future__ import annotations

import json
from pathlib import Path

from runs import NAME, QUICKSTART, headrace, small_settings


def test_a_second_call_goes_on_with_the_run(tmp_path: Path) -> None:
    for versions in (1, 2):
        settings = small_settings(tmp_path, f"run.versions={versions}")
        words = [word for setting in settings for word in ("--set", setting)]
        done = headrace("train", str(QUICKSTART), "--resume", *words)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / NAME / "summary.json").read_text())["steps"] == versions
    refused = headrace("train", str(QUICKSTART), *words)
    assert (refused.returncode, "exists: choose another [run] name" in refused.stderr) == (2, True)

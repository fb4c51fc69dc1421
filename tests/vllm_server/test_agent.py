"""The example agent, which uses the `openai` package, learns its task through the gateway and a real vLLM server."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from example_runs import balanced, settings
from runs import ROOT, headrace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

AGENT = str(ROOT / "examples/agent/agent.toml")
SERVER = ("engine.kind=vllm", 'engine.arguments=["--enforce-eager"]', "observe.display=none")


def test_the_example_agent_learns_its_task(tmp_path: Path) -> None:
    done = headrace("train", AGENT, "--json", *settings(tmp_path, *SERVER), timeout=1700)
    assert done.returncode == 0, done.stderr
    assert balanced(json.loads(done.stdout))["failed"] == 0
    with sqlite3.connect(tmp_path / "run" / "journal.db") as db:
        found = db.execute("SELECT prompts, pass_1 FROM evaluations ORDER BY rowid").fetchall()
    print(f"held-out {found}")
    (few, before), (prompts, after) = found[0], found[-1]
    assert few == prompts == 100
    assert before < 0.5 and after >= 0.65, "right at the first try"

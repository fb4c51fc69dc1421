"""The shipped example, whole, on a real vLLM server: it learns its task."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from example_runs import EXAMPLE, balanced, settings
from runs import headrace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def test_the_shipped_example_learns_its_task(tmp_path: Path) -> None:
    done = headrace("train", EXAMPLE, "--json", *settings(tmp_path, "observe.display=none"), timeout=1700)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["outcome"] == "finished"
    assert balanced(summary)["failed"] == 0
    with sqlite3.connect(tmp_path / "run" / "journal.db") as db:
        found = db.execute("SELECT version, prompts, pass_1 FROM evaluations ORDER BY rowid").fetchall()
        proofs = db.execute("SELECT count(*) FROM deliveries WHERE accepted").fetchone()[0]
    print(f"held-out {found}, trained for {summary['train_seconds']:.0f} s")
    assert proofs >= 60
    (_, few, before), (version, prompts, after) = found[0], found[-1]
    assert few == prompts == 1000 and version >= 60
    assert before < 0.5 and after >= 0.9

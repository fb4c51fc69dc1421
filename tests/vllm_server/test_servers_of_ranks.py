"""A trainer of two ranks publishes to a real server: each rank its own slices. The server assembles and proves them."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from example_runs import EXAMPLE, balanced, settings
from runs import SMALL, headrace

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("transport", ["shm", "tcp", "nccl"])
def test_a_server_proves_the_versions_of_two_ranks(tmp_path: Path, transport: str) -> None:
    more = [*SMALL, "run.versions=2", "training.ranks=2", f"delivery.transport={transport}", "observe.display=none"]
    done = headrace("train", EXAMPLE, "--json", *settings(tmp_path, *more), timeout=1700)
    assert done.returncode == 0, done.stderr
    assert balanced(json.loads(done.stdout))["failed"] == 0
    with sqlite3.connect(tmp_path / "run" / "journal.db") as db:
        proved = db.execute("SELECT version, canary_error FROM deliveries WHERE accepted ORDER BY rowid").fetchall()
        refused = db.execute("SELECT version FROM deliveries WHERE NOT accepted").fetchall()
    print(f"proved by {transport}: {proved}")
    assert len(proved) >= 2 and not refused
    assert all(error < 1e-3 for _, error in proved)

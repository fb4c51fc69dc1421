"""A run directory that an earlier release wrote, and left when it was killed: it reports, replays and resumes."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from runs import ROOT, headrace

OLD_RUN = ROOT / "tests/data/run_schema_2"
"""Eight steps of depth 2 with `[pipeline] record`, a checkpoint after step 6, 12 groups in flight and 16 prefixes."""
WRITTEN_ON = "Intel(R) Xeon(R) Processor @ 2.50GHz"
SAME_CPU = f": {WRITTEN_ON}\n" in Path("/proc/cpuinfo").read_text()
"""Whether sums are made as on the machine that wrote the run: elsewhere replayed weights may differ in the last bit."""


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD_RUN, tmp_path / "run"))


def scalar(run: Path, sql: str) -> int:
    with sqlite3.connect(run / "journal.db") as db:
        return int(db.execute(sql).fetchone()[0])


def test_the_ledger_of_an_old_run_is_read_and_the_file_is_not_changed(old_run: Path) -> None:
    before = (old_run / "journal.db").read_bytes()
    found = headrace("ledger", str(old_run))
    assert found.returncode == 0, found.stderr
    assert "44 admitted = 32 trained + 0 dropped + 0 failed + 12 in flight" in found.stdout
    assert "balanced" in found.stdout
    assert (old_run / "journal.db").read_bytes() == before


def test_an_old_run_reports_and_shows_its_rollouts(old_run: Path) -> None:
    report = headrace("report", str(old_run))
    assert report.returncode == 0, report.stderr
    assert json.loads((old_run / "summary.json").read_text())["steps"] == 8
    assert (old_run / "report.html").stat().st_size > 10_000
    rollouts = headrace("rollouts", str(old_run), "--json", "--where", "state = 'trained'")
    assert rollouts.returncode == 0, rollouts.stderr
    assert len(json.loads(rollouts.stdout)) == 128


def test_an_old_run_replays(old_run: Path) -> None:
    again = headrace("replay", str(old_run), "--json")
    found = json.loads(again.stdout)
    assert (found["steps"], found["versions"]) == (8, 9)
    if SAME_CPU:
        assert found["identical"], again.stdout


def test_an_old_run_goes_on_and_balances(old_run: Path) -> None:
    kept = {prefix: tokens for prefix, tokens in _partials(old_run).items() if tokens}
    assert kept, "or there is nothing to go on from"
    resumed = headrace("resume", str(old_run))
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert scalar(old_run, "SELECT MAX(step) FROM steps") == 14
    assert scalar(old_run, "SELECT COUNT(*) FROM groups WHERE state = 'in_flight'") == 0
    assert scalar(old_run, "SELECT COUNT(*) FROM groups") == scalar(
        old_run, "SELECT COUNT(*) FROM groups WHERE state IN ('trained', 'dropped', 'failed')"
    )
    discarded = "SELECT COUNT(*) FROM restarts WHERE reason = 'saved tokens were of no use'"
    assert scalar(old_run, discarded) == 0, "saved prefixes were thrown away"
    again = headrace("replay", str(old_run), "--json")
    assert json.loads(again.stdout)["steps"] == 14
    if SAME_CPU:
        assert json.loads(again.stdout)["identical"]


def _partials(run: Path) -> dict[str, int]:
    with sqlite3.connect(run / "journal.db") as db:
        return dict(db.execute("SELECT rollout, SUM(tokens) FROM partials GROUP BY rollout").fetchall())

"""A run whose machine loses its power at thirty seeded moments, and goes on each time from what the disk has.

One run is recorded (`power_failure.py`). For each moment its directory is built again as the disk would have it:
without unsynced writes and names, or with some of them. Recovery must then find every step that was reported, with all
its tokens. A few of the directories are resumed for real.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.buffer.journal import Journal, open_readonly
from headrace.buffer.store import check_resumable
from headrace.observe.metrics import reported_step
from headrace.pipeline.batches import recorded_batches
from headrace.run_dir import RunDir
from headrace.training.checkpoints.base import latest, read_state, set_aside

sys.path.insert(0, str(Path(__file__).parent.parent))

from power_failure import Disk, Event, Kept, build_shim, missed, moments, read_log, recording

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("HEADRACE_CHAOS_SEED", "7"))
VERSIONS = 12
MOMENTS = 30
RESUMED = 3
"""The number of moments that are resumed for real."""
POLICY_STEP = b'"objective":"policy"'
SETTINGS = (
    "run.name=run",
    f"run.versions={VERSIONS}",
    "training.checkpoint_every=3",
    "training.keep_checkpoints=2",
    "warm_start.steps=2",
    "warm_start.batch=8",
    "rollouts.group_size=4",
    "rollouts.max_tokens=12",
    "buffer.groups=4",
    "engine.slots=16",
    "evaluate.prompts=4",
    "evaluate.every=0",
    "observe.display=none",
)


def headrace(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """The directory above a run that has ended, and everything that was done to its files."""
    directory = tmp_path_factory.mktemp("power")
    root, log = directory / "root", directory / "log"
    root.mkdir()
    settings = [part for setting in (*SETTINGS, f"run.directory={root}") for part in ("--set", setting)]
    shim = build_shim(directory)
    done = headrace("train", str(ROOT / "examples/quickstart/quickstart.toml"), *settings, **recording(shim, root, log))
    assert done.returncode == 0, done.stderr
    return root, list(read_log(log))


def test_the_log_holds_all_that_the_run_wrote(recorded: tuple[Path, list[Event]], tmp_path: Path) -> None:
    assert missed(*recorded, tmp_path / "again") == []


def reported(disk: Disk, directory: Path) -> int:
    """The last step that the run has reported by now, whether the report is on the disk or not."""
    path = directory / "metrics.jsonl"
    path.write_bytes(disk.read("run/metrics.jsonl"))
    return reported_step(path)


def recovered(run: Path) -> int:
    """The last step that a resume finds; all its tokens can be read, and the ledgers balance."""
    paths, config = RunDir.open(run)
    check_resumable(paths.journal)
    with open_readonly(paths.journal) as reader:
        last = reader.last_step()
    set_aside(paths.checkpoints, last)
    newest = latest(paths.checkpoints)
    step = read_state(newest).policy_steps if newest is not None else 0
    with Journal(paths.journal) as journal:
        before = journal.recover(step=step)
        journal.flush()
        batches = [batch.step for batch in recorded_batches(config, paths.journal, step, before.resume_step)]
        with open_readonly(paths.journal) as reader:
            assert reader.imbalances() == []
    assert batches == list(range(step + 1, before.resume_step + 1))
    return before.resume_step


def test_friction_34_no_power_failure_loses_a_step_that_was_reported(
    recorded: tuple[Path, list[Event]], tmp_path: Path
) -> None:
    root, events = recorded
    chance, disk, done = random.Random(SEED), Disk(root), 0
    # The run can be resumed once it has reported a step.
    begin = 1 + next(at for at, event in enumerate(events) if event.kind == "W" and POLICY_STEP in event.a)
    chosen = [begin + at for at in moments(events[begin:], MOMENTS, chance)]
    resumed = set(chance.sample(chosen, RESUMED))
    reports = set()
    for number, moment in enumerate(chosen):
        for event in events[done:moment]:
            disk.apply(event)
        done = moment
        kept: Kept = "something" if number % 2 else "nothing"
        where = f"moment {moment} of {len(events)}, {kept} kept, seed {SEED}"
        disk.write(tmp_path / str(moment), kept, chance)
        run, last = tmp_path / str(moment) / "run", reported(disk, tmp_path)
        reports.add(last)
        if moment in resumed:
            shutil.copytree(run, tmp_path / "resumed/run")
            goes_on(tmp_path / "resumed/run", last, where)
            shutil.rmtree(tmp_path / "resumed")
        found = recovered(run)
        assert found >= last, f"{where}: of {last} reported steps {found} are left"
        shutil.rmtree(tmp_path / str(moment))
    assert len(reports) > 5


def goes_on(run: Path, last: int, where: str) -> None:
    """Resume a run to its end: it must still have the steps that it had reported, and balance."""
    done = headrace("resume", str(run), "--set", f"run.directory={run.parent}")
    finished = "is finished" in done.stderr
    assert done.returncode == 0 or finished, f"{where}: {done.stderr}"
    ledger = json.loads(headrace("ledger", str(run), "--json").stdout)
    assert ledger["balanced"], f"{where}: {ledger['problems']}"
    with sqlite3.connect(run / "journal.db") as db:
        steps = [step for (step,) in db.execute("SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
        again = db.execute("SELECT to_step FROM restarts WHERE process = 'controller'").fetchall()
        digests = db.execute("SELECT COUNT(DISTINCT digest) FROM versions GROUP BY step").fetchall()
    assert steps == list(range(1, VERSIONS + 1)), where
    assert all(to >= last for (to,) in again) and (again or finished), where
    assert all(count == 1 for (count,) in digests), f"{where}: a step has two different weights"

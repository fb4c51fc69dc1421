"""A step that was reported is on the disk: a power failure at any moment loses nothing that came before the report."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.buffer.journal import Journal, open_readonly
from power_failure import Disk, Event, Kept, build_shim, missed, moments, read_log, recording

STEPS = 12
RUN = f"""
    import sys
    from pathlib import Path
    from test_recovery import admit, complete
    from headrace.buffer.journal import Journal
    from headrace.observe.records import StepRecord
    from headrace.config.file_digests import sync
    from headrace.types import Version

    root = Path(sys.argv[1])
    (root / "run").mkdir()
    sync(root)
    with Journal(root / "run/journal.db") as journal, (root / "reported").open("w", buffering=1) as reported:
        journal.version(Version(id=0, parent=-1, step=0, digest=0))
        for step in range(1, {STEPS} + 1):
            admit(journal, step)
            journal.flush()
            complete(journal, step)
            journal.flush()
            journal.group_ended(step, "trained", step=step)
            row = dict(version=step - 1, objective="policy", groups=1, rollouts=2, tokens=6, trained_tokens=4)
            done = journal.step(StepRecord(step=step, **row), {{}})
            done.result(60)
            reported.write(f"{{step}}\\n")
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """A journal of some steps, each of them reported when it is on the disk."""
    directory = tmp_path_factory.mktemp("power")
    root, log = directory / "root", directory / "log"
    root.mkdir()
    shim = build_shim(directory)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, **recording(shim, root, log)}
    subprocess.run([sys.executable, "-c", textwrap.dedent(RUN), str(root)], env=environment, check=True, timeout=120)
    return root, list(read_log(log))


def test_the_log_holds_all_that_was_written(recorded: tuple[Path, list[Event]], tmp_path: Path) -> None:
    assert missed(*recorded, tmp_path / "again") == []
    assert (tmp_path / "again/run/segments/000001.seg").stat().st_size > 0


@pytest.mark.parametrize("kept", ["nothing", "something", "all"])
def test_friction_34_a_power_failure_loses_no_step_that_was_reported(
    recorded: tuple[Path, list[Event]], tmp_path: Path, kept: Kept
) -> None:
    root, events = recorded
    chance, disk, done, reports = random.Random(34), Disk(root), 0, set()
    for moment in moments(events, 30, chance):
        for event in events[done:moment]:
            disk.apply(event)
        done = moment
        lines = disk.read("reported").split()
        if not lines:
            continue
        reported = int(lines[-1])
        reports.add(reported)
        disk.write(tmp_path / str(moment), kept, chance)
        path = tmp_path / str(moment) / "run/journal.db"
        with Journal(path) as journal:
            found = journal.recover(step=0)
            assert found.resume_step >= reported, f"of {reported} steps, {found.resume_step} are left at {moment}"
        with open_readonly(path) as reader:
            assert reader.imbalances() == []
            assert all(len(reader.trained_groups(step)) == 1 for step in range(1, found.resume_step + 1))
    assert len(reports) > 5

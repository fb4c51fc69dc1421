"""The loop of somebody who tries things: start, stop, start again, go on; what fails says so once."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import NAME, QUICKSTART, ROOT, headrace, small_settings, start

SECONDS = 150.0


def words(directory: Path, *settings: str) -> list[str]:
    return [word for setting in small_settings(directory, *settings) for word in ("--set", setting)]


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def reasons(run_dir: Path) -> dict[str, int]:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return dict(db.execute("SELECT reason, COUNT(*) FROM groups WHERE state = 'failed' GROUP BY reason"))


def test_frictions_10_and_11_a_finished_run_goes_on_only_when_it_is_told_to(tmp_path: Path) -> None:
    run_dir = tmp_path / NAME
    assert headrace("train", str(QUICKSTART), *words(tmp_path, "run.versions=2")).returncode == 0
    first = json.loads((run_dir / "summary.json").read_text())
    refused = headrace("resume", str(run_dir))
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert f"headrace: {run_dir} is finished, with 2 versions; train more" in refused.stderr
    assert json.loads((run_dir / "summary.json").read_text()) == first
    again = headrace("train", str(QUICKSTART), "--resume", *words(tmp_path, "run.versions=2"))
    assert (again.returncode, "is finished" in again.stdout) == (0, True), again.stderr
    more = headrace("resume", str(run_dir), "--set", "run.versions=3", "--set", "observe.display=plain")
    assert more.returncode == 0, more.stderr
    said = more.stdout + more.stderr
    assert "version 2/3" in said and "version 0/3" not in said
    assert "held-out before training" not in said
    assert "held-out again, as the run goes on" in said
    summary = json.loads((run_dir / "summary.json").read_text())
    with sqlite3.connect(run_dir / "journal.db") as db:
        meta = {key: json.loads(value) for key, value in db.execute("SELECT key, value FROM meta")}
    seconds = meta["train_ended"] - meta["train_started"]
    assert summary["train_seconds"] == pytest.approx(first["train_seconds"] + seconds, abs=0.01)


def test_a_run_is_replaced_only_by_one_that_can_start(tmp_path: Path) -> None:
    run_dir = tmp_path / NAME
    given = words(tmp_path, "run.versions=1", "evaluate.prompts=0")
    assert headrace("train", str(QUICKSTART), *given).returncode == 0
    (run_dir / "mine.txt").write_text("mine")
    refused = headrace("train", str(QUICKSTART), "--overwrite", *given, "--set", "task.path=nowhere.jsonl")
    assert (refused.returncode, (run_dir / "mine.txt").exists()) == (2, True), refused.stderr
    replaced = headrace("train", str(QUICKSTART), "--overwrite", *given)
    assert (replaced.returncode, (run_dir / "mine.txt").exists()) == (0, False), replaced.stderr
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("file", ["config.toml", "logs"])
def test_friction_9_ctrl_c_while_a_run_starts_leaves_nothing(tmp_path: Path, file: str) -> None:
    run = start("train", str(QUICKSTART), *words(tmp_path, "pipeline.launcher=local"))
    wait_for(lambda: (tmp_path / NAME / file).exists() or run.poll() is not None)
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=SECONDS)
    assert run.returncode == 130, said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_friction_12_a_run_whose_directory_is_removed_ends_with_one_line(tmp_path: Path) -> None:
    run_dir = tmp_path / NAME
    run = start("train", str(QUICKSTART), *words(tmp_path, "run.versions=10000", "evaluate.prompts=0"))
    wait_for(lambda: (run_dir / "status.json").exists() or run.poll() is not None)
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    _, said = run.communicate(timeout=SECONDS)
    assert (run.returncode, "Traceback" in said) == (2, False), said
    assert said.splitlines()[-1] == f"headrace: {run_dir}, the directory of the run, is gone: the run ends"


def test_friction_14_prompts_that_are_too_long_are_tried_once_and_counted_together(tmp_path: Path) -> None:
    lines = (ROOT / "examples/quickstart/train.jsonl").read_text().splitlines()[:8]
    long = [json.dumps({"prompt": "ab" * (40 + i), "answer": "a"}) for i in range(4)]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([*lines, *long]) + "\n")
    more = ("run.versions=6", f"task.path={data}", "evaluate.prompts=0", "warm_start.steps=0", "observe.display=plain")
    done = headrace("train", str(QUICKSTART), *words(tmp_path, *more))
    assert done.returncode == 0, done.stderr
    ((reason, count),) = reasons(tmp_path / NAME).items()
    assert (
        reason
        == "the prompt leaves no room for an answer under the longest sequence of 64 tokens ([engine] max_length)"
    )
    assert count == 4, "there are several epochs, and each long prompt was tried in the first one only"
    assert (done.stdout + done.stderr).count(reason) == 1, "a reason is told once"


def test_friction_17_a_reward_that_hangs_ends_the_run_soon(tmp_path: Path) -> None:
    file = tmp_path / "hangs.py"
    file.write_text("import time\ndef reward(completion): time.sleep(1000)\n")
    more = (f"task.reward={file}:reward", "scoring.timeout=0.5", "evaluate.prompts=0", "observe.display=plain")
    done = headrace("train", str(QUICKSTART), *words(tmp_path, *more))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "headrace: the last 20 groups all failed, the last one because: the reward function hangs: 8"
    )
    assert sum(reasons(tmp_path / NAME).values()) == 20

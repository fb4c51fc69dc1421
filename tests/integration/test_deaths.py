"""Processes that die, rewards that fail, a Ctrl-C: the run ends in order, says why, and can go on."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import QUICKSTART, headrace, segments_left, small_config, small_settings, start, worker_pids

from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run


def settings(directory: Path, *more: str) -> list[str]:
    return [part for setting in small_settings(directory, *more) for part in ("--set", setting)]


def wait_until_training(run_dir: Path, steps: int) -> None:
    """Until this many policy steps are in the journal."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run_dir / "journal.db").is_file():
            with sqlite3.connect(run_dir / "journal.db") as db:
                try:
                    (done,) = db.execute("SELECT count(*) FROM steps WHERE objective = 'policy'").fetchone()
                except sqlite3.OperationalError:
                    done = 0
            if done >= steps:
                return
        time.sleep(0.05)
    raise TimeoutError(f"{run_dir} did not reach step {steps}")


def ledger(run_dir: Path) -> dict[str, int]:
    found = json.loads((run_dir / "summary.json").read_text())["ledger"]
    assert found["admitted"] == found["trained"] + found["dropped"] + found["failed"] + found["in_flight"]
    assert found["in_flight"] == 0
    return found


@pytest.mark.parametrize("victim", ["engine-0", "trainer-0"])
def test_a_dead_worker_ends_the_run_with_its_name(tmp_path: Path, victim: str) -> None:
    run = start("train", str(QUICKSTART), *settings(tmp_path, "run.versions=500", "pipeline.restarts=0"))
    run_dir = tmp_path / "run"
    wait_until_training(run_dir, 2)
    os.kill(worker_pids(run_dir)[victim], signal.SIGKILL)
    killed = time.monotonic()
    _, stderr = run.communicate(timeout=60)
    assert time.monotonic() - killed < 60
    assert run.returncode == 1
    assert f"headrace: {victim} died: killed by signal 9" in stderr
    assert worker_pids(run_dir) == {}
    assert segments_left() == set()
    found = ledger(run_dir)
    # Groups that the engine was at work on fail with its death, those beyond it are dropped with the run.
    assert found["dropped"] + found["failed"] > 0
    with sqlite3.connect(run_dir / "journal.db") as db:
        reasons = {reason for (reason,) in db.execute("SELECT reason FROM groups WHERE state = 'failed'")}
    assert all(f"{victim} died: killed by signal 9" in reason for reason in reasons)
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "failed"


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_starts_begins_with_the_resume(tmp_path: Path) -> None:
    run = start("train", str(QUICKSTART), *settings(tmp_path, "pipeline.launcher=local"))
    run_dir = tmp_path / "run"
    deadline = time.monotonic() + 120
    while not worker_pids(run_dir) and time.monotonic() < deadline:
        time.sleep(0.01)
    # The workers still load their libraries. Nobody else may begin the run meanwhile.
    run.send_signal(signal.SIGSTOP)
    assert not (run_dir / "journal.db").exists()
    beside = headrace("resume", str(run_dir))
    assert (beside.returncode, beside.stdout) == (2, "")
    assert beside.stderr == f"headrace: {run_dir}/journal.db is in use by a live run (process {run.pid})\n"
    run.kill()
    run.communicate(timeout=60)
    while worker_pids(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    done = headrace("resume", str(run_dir), "--set", "run.versions=3", "--set", "observe.display=plain")
    assert done.returncode == 0, done.stderr
    assert "the run had ended before it began: it begins now" in done.stderr + done.stdout
    assert ledger(run_dir)["trained"] == 3 * 4
    # What has been trained is not thrown away because the journal is gone.
    (run_dir / "journal.db").unlink()
    refused = headrace("resume", str(run_dir))
    assert (refused.returncode, refused.stderr) == (
        2,
        f"headrace: {run_dir}: nothing to resume (it has no journal.db)\n",
    )


def deliveries(run_dir: Path, engine: str) -> int:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return db.execute("SELECT count(*) FROM deliveries WHERE accepted AND engine = ?", (engine,)).fetchone()[0]


@pytest.mark.parametrize("engines", [1, 2])
def test_a_killed_engine_comes_back_at_the_current_version_and_nothing_is_lost(tmp_path: Path, engines: int) -> None:
    more = ["run.versions=500", f"engine.count={engines}", "observe.display=plain"]
    run = start("train", str(QUICKSTART), *settings(tmp_path, *more))
    run_dir = tmp_path / "run"
    wait_until_training(run_dir, 2)
    os.kill(worker_pids(run_dir)["engine-0"], signal.SIGKILL)
    deadline, before = time.monotonic() + 120, deliveries(run_dir, "engine-0")
    while deliveries(run_dir, "engine-0") < before + 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    run.send_signal(signal.SIGINT)
    stdout, stderr = run.communicate(timeout=100)
    assert run.returncode == 130, stderr
    assert "engine-0 died: killed by signal 9; it is started again" in stdout
    assert "engine-0 is back" in stdout
    assert deliveries(run_dir, "engine-0") >= before + 2
    found = ledger(run_dir)
    assert found["failed"] == 0
    with sqlite3.connect(run_dir / "journal.db") as db:
        rows = db.execute("SELECT version, accepted FROM deliveries WHERE engine = 'engine-0'").fetchall()
    accepted = [version for version, was in rows if was]
    assert accepted == sorted(accepted), "no version goes back"
    # The process that takes the place of another may have to prove the version that it had: that one alone.
    assert len(accepted) - len(set(accepted)) <= 1, "no process proves a version twice"
    assert segments_left() == set()


def test_a_killed_controller_leaves_no_orphan_and_its_run_goes_on(tmp_path: Path) -> None:
    run = start("train", str(QUICKSTART), *settings(tmp_path, "run.versions=500", "training.checkpoint_every=2"))
    run_dir = tmp_path / "run"
    wait_until_training(run_dir, 5)
    run.kill()
    run.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while worker_pids(run_dir) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert worker_pids(run_dir) == {}

    again = headrace("resume", str(run_dir), "--set", "run.versions=12", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["outcome"] == "finished"
    assert ledger(run_dir)["trained"] == 4 * 12
    with sqlite3.connect(run_dir / "journal.db") as db:
        steps = [step for (step,) in db.execute("SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
        reasons = {reason for (reason,) in db.execute("SELECT DISTINCT reason FROM groups WHERE state = 'dropped'")}
        versions = [version for (version,) in db.execute("SELECT id FROM versions ORDER BY rowid")]
    assert steps == list(range(1, 13)), "what the checkpoint did not hold is trained again, once"
    assert reasons <= {"surplus"}, "nothing that was begun is thrown away, unless 12 versions have no use for it"
    assert versions == sorted(set(versions)), "versions are never reused"
    assert segments_left() == set()


def in_flight(run_dir: Path) -> int:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return db.execute("SELECT count(*) FROM groups WHERE state = 'in_flight'").fetchone()[0]


def trained_state(run_dir: Path) -> dict[str, bytes]:
    """The files of the last checkpoint that hold numbers: weights or adapter, optimizer."""
    newest = max((run_dir / "checkpoints").glob("step-*"))
    return {str(path.relative_to(newest)): path.read_bytes() for path in newest.rglob("*.safetensors")}


@pytest.mark.parametrize(
    "more", [pytest.param((), id="full"), pytest.param(("lora.rank=4",), id="lora", marks=pytest.mark.slow)]
)
def test_a_synchronous_run_killed_between_steps_ends_as_if_undisturbed(
    tmp_path: Path, stop: Callable[..., Path], more: tuple[str, ...]
) -> None:
    mine = ["buffer.depth=0", "run.versions=6", "training.checkpoint_every=2", "evaluate.prompts=0", *more]
    stopped = stop("engine", "headrace.engines.embedded.engine:EngineLoop.submit", 4, "nobody")
    run_dir = tmp_path / "run"
    run = start("train", str(QUICKSTART), *settings(tmp_path, *mine))
    wait_until_training(run_dir, 3)
    deadline = time.monotonic() + 30
    while in_flight(run_dir) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert stopped.exists() and in_flight(run_dir) == 4, "the groups of the fourth step are begun, and have no token"
    run.kill()
    run.communicate(timeout=30)
    while worker_pids(run_dir) and time.monotonic() < deadline:
        time.sleep(0.05)

    again = headrace("resume", str(run_dir))
    assert again.returncode == 0, again.stderr
    assert ledger(run_dir) == {"admitted": 24, "trained": 24, "dropped": 0, "failed": 0, "in_flight": 0}
    twin = headrace("train", str(QUICKSTART), *settings(tmp_path / "twin", *mine))
    assert twin.returncode == 0, twin.stderr
    undisturbed = trained_state(tmp_path / "twin" / "run")
    assert len(undisturbed) == 2 and trained_state(run_dir) == undisturbed


def test_a_killed_trainer_comes_back_and_nothing_is_generated_again(tmp_path: Path) -> None:
    more = ["run.versions=12", "training.checkpoint_every=3", "observe.display=plain", "pipeline.record=true"]
    run = start("train", str(QUICKSTART), *settings(tmp_path, *more))
    run_dir = tmp_path / "run"
    wait_until_training(run_dir, 5)
    os.kill(worker_pids(run_dir)["trainer-0"], signal.SIGKILL)
    stdout, stderr = run.communicate(timeout=200)
    assert run.returncode == 0, stderr
    assert "trainer-0 died: killed by signal 9; it is started again" in stdout
    assert "trainer-0 is back" in stdout
    found = ledger(run_dir)
    assert (found["admitted"], found["trained"]) == (48, 48)
    with sqlite3.connect(run_dir / "journal.db") as db:
        ((after, until),) = db.execute("SELECT from_step, to_step FROM restarts").fetchall()
        versions = db.execute("SELECT id, step, digest FROM versions ORDER BY id").fetchall()
    assert after in (0, 3, 6) or (after, until) == (-2, until)
    assert 5 <= until <= 8
    assert [version for version, _, _ in versions] == list(range(len(versions)))
    assert [step for _, step, _ in versions].count(until) <= 2
    again = headrace("replay", str(run_dir), "--json")
    assert again.returncode == 0, again.stdout + again.stderr
    replayed = json.loads(again.stdout)
    assert replayed["identical"] and replayed["versions"] == len(versions)
    assert replayed["replayed_digest"] == versions[-1][2]
    assert replayed["scheduled_events"] >= 3 * 48
    assert segments_left() == set()


def test_ctrl_c_drains_and_resume_goes_on(tmp_path: Path) -> None:
    run = start("train", str(QUICKSTART), *settings(tmp_path, "run.versions=500"))
    run_dir = tmp_path / "run"
    wait_until_training(run_dir, 3)
    run.send_signal(signal.SIGINT)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 130, stderr
    assert "headrace resume" in stderr
    interrupted = ledger(run_dir)
    before = json.loads((run_dir / "summary.json").read_text())
    assert before["outcome"] == "interrupted"
    done = before["steps"]
    assert interrupted["trained"] == 4 * done

    again = headrace("resume", str(run_dir), "--set", f"run.versions={done + 2}", "--json")
    assert again.returncode == 0, again.stderr
    after = json.loads(again.stdout)
    assert after["outcome"] == "finished"
    assert after["ledger"]["trained"] == 4 * (done + 2)
    with sqlite3.connect(run_dir / "journal.db") as db:
        versions = db.execute("SELECT id, parent, step FROM versions ORDER BY id").fetchall()
        steps = [step for (step,) in db.execute("SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
        groups = db.execute("SELECT count(*), count(DISTINCT id) FROM groups").fetchone()
    assert steps == list(range(1, done + 3)), "no step is lost, none is done twice"
    assert groups[0] == groups[1]
    ids = [version for version, _, _ in versions]
    assert ids == sorted(set(ids)), "versions are never reused"
    resumed = versions[done + 1]
    assert resumed[1:] == (done, done), "the first version after the resume continues the checkpointed one"
    assert "config now:" in again.stderr


REWARD = """
import time

def reward(completion, answer):
    if answer.startswith("a"):
        raise ValueError("cannot judge this one")
    if answer.startswith("b"):
        time.sleep(60)
    return 0.5
"""


def test_a_reward_that_raises_or_hangs_fails_that_rollout_only(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    data = tmp_path / "data.jsonl"
    answers = ["abcdef", "bcdefg", "cdefgh", "defghi", "efghij", "fghijk", "ghijkl", "hijklm"]
    lines = [{"prompt": answer[::-1], "answer": answer, "demonstration": answer} for answer in answers]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = small_config(
        tmp_path,
        f"task.path={data}",
        f"task.heldout_path={data.with_name('heldout.jsonl')}",
        f"task.reward={tmp_path / 'reward.py'}:reward",
        "scoring.timeout=1.0",
        "scoring.workers=2",
        "run.versions=2",
        "evaluate.prompts=1",
    )
    data.with_name("heldout.jsonl").write_text(
        json.dumps({"prompt": "zyxwvu", "answer": "uvwxyz", "demonstration": "uvwxyz"}) + "\n"
    )
    outcome = start_run(config, NoProgress())
    assert outcome.outcome == "finished"
    assert ledger(outcome.run_dir.path)["trained"] == 8
    assert outcome.summary["ledger"]["failed"] >= 1
    reasons = " ".join(outcome.summary["reasons_rollouts"]["failed"])
    assert "cannot judge this one" in reasons
    assert "1 s" in reasons

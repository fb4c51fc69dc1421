"""A run that is killed again and again, everywhere, and ends as if nothing had happened.

Own command, because it takes minutes: `make chaos`. The moments and the victims follow from the seed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("HEADRACE_CHAOS_SEED", "7"))
VERSIONS = 150
CHECKPOINT_EVERY = 10
KILLS = ["engine-0", "trainer-0", "reward", "controller"] * 3
RUN_SECONDS = 1500
SETTINGS = (
    "run.name=chaos",
    f"run.versions={VERSIONS}",
    f"training.checkpoint_every={CHECKPOINT_EVERY}",
    "pipeline.restarts=10",
    "evaluate.every=0",
    "observe.display=none",
    "observe.timeline=false",
)


class Chaos:
    """A run as a shell starts it, and a hand that kills."""

    def __init__(self, directory: Path) -> None:
        self.run_dir = directory / "chaos"
        self.log = (directory / "log.txt").open("w+")
        settings = [part for setting in (*SETTINGS, f"run.directory={directory}") for part in ("--set", setting)]
        self.process = self._start("train", str(ROOT / "examples/quickstart/quickstart.toml"), *settings)
        self.deadline = time.monotonic() + RUN_SECONDS
        self.killed: Counter[str] = Counter()

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "headrace", *arguments]
        return subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=ROOT, start_new_session=True)

    def steps(self) -> int:
        """Policy steps in the journal."""
        try:
            with sqlite3.connect(f"file:{self.run_dir / 'journal.db'}?mode=ro", uri=True, timeout=60) as db:
                return db.execute("SELECT COUNT(*) FROM steps WHERE objective = 'policy'").fetchone()[0]
        except sqlite3.OperationalError:
            return 0

    def wait_for_step(self, step: int) -> None:
        """Until the journal has this step."""
        while self.steps() < step:
            assert self.process.poll() is None, f"the run ended:\n{self.output()}"
            assert time.monotonic() < self.deadline, f"no step {step} in time:\n{self.output()}"
            time.sleep(0.1)

    def kill(self, victim: str) -> None:
        """kill -9; the controller is resumed."""
        if victim == "controller":
            self.process.kill()
            self.process.wait(30)
            while self.children():  # They end by themselves.
                assert time.monotonic() < self.deadline, "orphans stay"
                time.sleep(0.1)
            self.process = self._start("resume", str(self.run_dir))
        else:
            pids = self.children().get(victim, [])
            if not pids:
                return self._kill_later(victim)
            os.kill(pids[0], signal.SIGKILL)
        self.killed[victim] += 1
        return None

    def _kill_later(self, victim: str) -> None:
        """It is just being started again."""
        while victim not in self.children():
            assert self.process.poll() is None, f"the run ended:\n{self.output()}"
            assert time.monotonic() < self.deadline, f"{victim} does not come back"
            time.sleep(0.1)
        self.kill(victim)

    def children(self) -> dict[str, list[int]]:
        """The live processes of this run beside the controller, by name."""
        found: dict[str, list[int]] = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().decode().split("\0")
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if "headrace.cluster.worker_main" in command and str(self.run_dir) in command:
                name = f"{command[command.index('--role') + 1]}-{command[command.index('--rank') + 1]}"
                found.setdefault(name, []).append(int(process.name))
            elif "headrace.scoring.worker_main" in command and parent == self.process.pid:
                found.setdefault("reward", []).append(int(process.name))
        return found

    def output(self) -> str:
        """What the run has said, the end of it."""
        self.log.flush()
        return Path(self.log.name).read_text()[-4000:]


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Chaos:
    chance = random.Random(SEED)
    chaos = Chaos(tmp_path_factory.mktemp("chaos"))
    victims = chance.sample(KILLS, len(KILLS))
    moments = sorted(chance.sample(range(3, VERSIONS - 10), len(KILLS)))
    try:
        for moment, victim in zip(moments, victims, strict=True):
            chaos.wait_for_step(moment)
            time.sleep(chance.random() * 0.5)
            chaos.kill(victim)
        code = chaos.process.wait(max(1.0, chaos.deadline - time.monotonic()))
        assert code == 0, chaos.output()
    finally:
        chaos.process.kill()
    return chaos


def rows(chaos: Chaos, sql: str) -> list[tuple]:
    with sqlite3.connect(chaos.run_dir / "journal.db") as db:
        return db.execute(sql).fetchall()


def test_the_ledger_balances_and_little_was_sampled_twice(survivor: Chaos) -> None:
    assert survivor.killed == Counter(KILLS) and survivor.killed.total() >= 12
    command = [sys.executable, "-m", "headrace", "ledger", str(survivor.run_dir), "--json"]
    ledger = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=ROOT).stdout)
    assert ledger["balanced"], ledger["problems"]
    assert ledger["groups"]["in_flight"] == ledger["rollouts"]["in_flight"] == 0
    assert ledger["groups"]["trained"] == 16 * VERSIONS
    assert ledger["groups"]["dropped"] == 0, ledger["groups"]["reasons"]
    sampled = sum(ledger["sampled_tokens"].values())
    assert ledger["regenerated_tokens"] <= 0.02 * sampled, f"{ledger['regenerated_tokens']} of {sampled}"
    assert ledger["restarts"] == {"controller": 3, "engine-0": 3, "trainer-0": 3}


def test_nothing_is_trained_twice_beyond_the_replay_of_a_checkpoint(survivor: Chaos) -> None:
    steps = [step for (step,) in rows(survivor, "SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
    assert steps == list(range(1, VERSIONS + 1))
    per_step = rows(survivor, "SELECT step, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY step")
    assert per_step == [(step, 16) for step in steps]
    for after, until in rows(survivor, "SELECT from_step, to_step FROM restarts WHERE to_step > 0"):
        # Two checkpoints: one may have been under way.
        assert 0 <= until - max(after, 0) <= 2 * CHECKPOINT_EVERY


def test_versions_never_repeat_and_each_continues_an_older_one(survivor: Chaos) -> None:
    versions = rows(survivor, "SELECT id, parent, step, digest FROM versions ORDER BY published, id")
    ids = [version for version, *_ in versions]
    assert ids == sorted(set(ids))
    assert all(parent < version for version, parent, *_ in versions)
    assert len(ids) > VERSIONS + 1, "who came back published under new ids"
    digests: dict[int, set[str]] = {}
    for _, _, step, digest in versions:
        digests.setdefault(step, set()).add(digest)
    assert sorted(digests) == list(range(VERSIONS + 1))
    assert all(len(found) == 1 for found in digests.values()), "trained again from the journal, to the last bit"


def test_it_has_learnt_as_if_undisturbed(survivor: Chaos) -> None:
    summary = json.loads((survivor.run_dir / "summary.json").read_text())
    (prompts,) = rows(survivor, "SELECT prompts FROM evaluations WHERE moment = 'after'")[-1]
    assert prompts >= 1000
    assert summary["heldout_after"] >= 0.9
    assert summary["outcome"] == "finished"
    assert summary["lag_max"] <= summary["lag_bound"]


def test_nothing_stays_behind(survivor: Chaos) -> None:
    assert survivor.children() == {}
    assert not (survivor.run_dir / "status.json").exists()

"""A run that is killed again and again, everywhere, and ends as if nothing had happened.

Own command, because it takes minutes: `make chaos`. The moments and the victims follow from the seed.
"""

from __future__ import annotations

import os
import random
import sqlite3
import time
from collections import Counter

import pytest

from victims import ROOT, Victim

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

SEED = int(os.environ.get("HEADRACE_CHAOS_SEED", "7"))
VERSIONS = 150
CHECKPOINT_EVERY = 10
KILLS = ["engine-0", "trainer-0", "reward", "controller"] * 3
RUN_SECONDS = 1500
SETTINGS = (
    f"training.checkpoint_every={CHECKPOINT_EVERY}",
    "pipeline.restarts=10",
    "evaluate.every=0",
    "observe.display=none",
    "observe.timeline=false",
)


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    chance = random.Random(SEED)
    quickstart = ROOT / "examples/quickstart/quickstart.toml"
    directory = tmp_path_factory.mktemp("chaos")
    victim = Victim(quickstart, directory, *SETTINGS, versions=VERSIONS, seconds=RUN_SECONDS)
    victims = chance.sample(KILLS, len(KILLS))
    moments = sorted(chance.sample(range(3, VERSIONS - 10), len(KILLS)))
    try:
        for moment, name in zip(moments, victims, strict=True):
            assert victim.wait_for_step(moment), victim.said(4000)
            time.sleep(chance.random() * 0.5)
            # Each kill is counted below, so a run that is resumed is not killed before it has recorded that.
            while victim.killed["controller"] > recorded_resumes(victim):
                assert victim.alive(), victim.said(4000)
                time.sleep(0.1)
            assert victim.kill(name, chance), f"{name} does not come back"
        assert victim.problem() is None
    finally:
        victim.end()
    return victim


def recorded_resumes(victim: Victim) -> int:
    return int(rows(victim, "SELECT COUNT(*) FROM restarts WHERE process = 'controller' AND reason = 'resumed'")[0][0])


def rows(chaos: Victim, sql: str) -> list[tuple]:
    with sqlite3.connect(chaos.run_dir / "journal.db") as db:
        return db.execute(sql).fetchall()


def test_the_ledger_balances_and_little_was_sampled_twice(survivor: Victim) -> None:
    assert survivor.killed == Counter(KILLS) and survivor.killed.total() >= 12
    ledger = survivor.ledger()
    assert ledger["balanced"], ledger["problems"]
    assert ledger["groups"]["in_flight"] == ledger["rollouts"]["in_flight"] == 0
    assert ledger["groups"]["trained"] == 16 * VERSIONS
    assert ledger["groups"]["dropped"] == 0, ledger["groups"]["reasons"]
    sampled = sum(ledger["sampled_tokens"].values())
    assert ledger["regenerated_tokens"] <= 0.02 * sampled, f"{ledger['regenerated_tokens']} of {sampled}"
    assert ledger["restarts"] == {"controller": 3, "engine-0": 3, "trainer-0": 3}


def test_nothing_is_trained_twice_beyond_the_replay_of_a_checkpoint(survivor: Victim) -> None:
    steps = [step for (step,) in rows(survivor, "SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
    assert steps == list(range(1, VERSIONS + 1))
    per_step = rows(survivor, "SELECT step, COUNT(*) FROM groups WHERE state = 'trained' GROUP BY step")
    assert per_step == [(step, 16) for step in steps]
    for after, until in rows(survivor, "SELECT from_step, to_step FROM restarts WHERE to_step > 0"):
        # Two checkpoints: one may have been under way.
        assert 0 <= until - max(after, 0) <= 2 * CHECKPOINT_EVERY


def test_versions_never_repeat_and_each_continues_an_older_one(survivor: Victim) -> None:
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


def test_it_has_learnt_as_if_undisturbed(survivor: Victim) -> None:
    summary = survivor.summary()
    (prompts,) = rows(survivor, "SELECT prompts FROM evaluations WHERE moment = 'after'")[-1]
    assert prompts >= 1000
    assert summary["heldout_after"] >= 0.9
    assert summary["outcome"] == "finished"
    assert summary["lag_max"] <= summary["lag_bound"]


def test_nothing_stays_behind(survivor: Victim) -> None:
    assert survivor.processes() == {}
    assert not (survivor.run_dir / "status.json").exists()

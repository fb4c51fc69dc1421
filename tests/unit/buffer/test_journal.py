"""The journal against the ledgers in memory, through errors, locks and kills."""

from __future__ import annotations

import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from committed_ledgers import committed

from headrace.buffer import store
from headrace.buffer.journal import Journal, open_readonly
from headrace.buffer.ledger import Ledgers
from headrace.errors import HeadraceError, UserError
from headrace.observe.records import DeliveryRecord, EvaluationRecord, SampleRecord, StepRecord
from headrace.types import Ending, Group, Prompt, Rollout, Trace, Version


def group(group_id: int, version: int = 0) -> Group:
    return Group(id=group_id, prompt=Prompt(id=f"prompt-{group_id}", text="2 + 2"), version=version)


def rollout(group_id: int, index: int, ending: Ending = "finished", reason: str = "") -> Rollout:
    trace = Trace.of_context(np.arange(3, dtype=np.int32))
    trace = trace.extended(
        np.array([7, 8], np.int32), np.array([-0.5, -1.5], np.float32), np.array([4, 5], np.int32), trained=True
    )
    reward = None if ending == "failed" else 1.0
    return Rollout(id=f"{group_id}/{index}", index=index, traces=[trace], ending=ending, reward=reward, reason=reason)


def test_every_event_is_a_row(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db", clock=lambda: 1000.0) as journal:
        journal.meta("name", "first")
        journal.meta("name", "run")
        journal.meta("lag_bound", 3)
        journal.version(Version(id=2, parent=1, step=4, digest=2**64 - 1))
        journal.delivery(
            DeliveryRecord(
                version=2, engine="engine-0", accepted=False, quarantined=True, reason="canary",
                live_digest=f"{255:016x}", canary_error=math.nan, swap_seconds=0.5, time=1000.0,
            )
        )  # fmt: skip
        journal.step(
            StepRecord(
                step=5,
                version=2,
                objective="policy",
                groups=1,
                rollouts=2,
                tokens=10,
                trained_tokens=4,
                reward_mean=0.5,
                loss=0.25,
            ),
            {1: 3, 0: 1},
            metrics={"kl": 0.125},
        )
        journal.evaluation(
            EvaluationRecord(
                version=2,
                moment="during",
                prompts=8,
                samples=2,
                pass_1=0.5,
                pass_k=0.75,
                reward_mean=0.5,
                tokens_mean=9.0,
                started=1.0,
                ended=2.0,
            )
        )
        journal.sample(SampleRecord(version=2, moment="during", prompt="p", question="2 + 2", answer="4", reward=1))
        journal.activity(process="trainer", started=1.0, ended=2.0, busy_seconds=0.75, generated_tokens=0)
    with open_readonly(tmp_path / "journal.db") as reader:
        assert reader.meta() == {"schema": 3, "name": "run", "lag_bound": 3}
        digest = "f" * 16
        assert reader.rows("SELECT id, parent, step, digest, published, policy FROM versions") == [
            {"id": 2, "parent": 1, "step": 4, "digest": digest, "published": 1000.0, "policy": "policy"}
        ]
        (delivery,) = reader.rows("SELECT * FROM deliveries")
        assert delivery["canary_error"] == math.inf and delivery["live_digest"] == f"{255:016x}"
        assert (delivery["accepted"], delivery["quarantined"], delivery["time"]) == (0, 1, 1000.0)
        (step,) = reader.rows("SELECT * FROM steps")
        assert step["lag_histogram"] == '{"0":1,"1":3}' and step["reward_mean"] == 0.5 and step["grad_norm"] is None
        assert step["metrics"] == '{"kl":0.125}' and step["ended"] == 1000.0
        assert reader.rows("SELECT pass_k, moment FROM evaluations") == [{"pass_k": 0.75, "moment": "during"}]
        assert reader.rows("SELECT answer, reward FROM samples") == [{"answer": "4", "reward": 1.0}]
        assert reader.rows("SELECT busy_seconds FROM activity") == [{"busy_seconds": 0.75}]


def test_a_rollout_keeps_its_numbers_and_its_tokens(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db", clock=iter([1.0, 2.0, 3.0, 4.0]).__next__)
    journal.admitted(group(3, version=4), ["3/0", "3/1"])
    journal.rollout_ended(rollout(3, 0))
    journal.rollout_ended(rollout(3, 1, "failed", "timeout"))
    journal.group_ended(3, "trained", step=9)
    journal.flush()
    with open_readonly(tmp_path / "journal.db") as reader:
        columns = "id, state, reason, ending, reward, tokens, sampled_tokens, oldest_version, newest_version, step"
        first, second = reader.rows(f"SELECT {columns}, admitted, ended FROM rollouts ORDER BY id")
        assert tuple(first.values()) == ("3/0", "trained", "", "finished", 1.0, 5, 2, 4, 5, 9, 1.0, 2.0)
        assert tuple(second.values()) == ("3/1", "failed", "timeout", "failed", None, 5, 2, 4, 5, None, 1.0, 3.0)
        (row,) = reader.rows("SELECT * FROM groups")
        assert (row["state"], row["step"], row["version"], row["ended"]) == ("trained", 9, 4, 4.0)
        (kept,) = reader.rollouts("state = ?", "trained")
        assert kept.id == "3/0" and kept.traces[0].token_ids.tolist() == [0, 1, 2, 7, 8]
        assert kept.traces[0].logprobs.tolist() == [0, 0, 0, -0.5, -1.5]
    journal.close()


def test_the_journal_counts_what_the_ledgers_count(tmp_path: Path) -> None:
    chance, ledgers, flying = random.Random(0), Ledgers(), []
    with Journal(tmp_path / "journal.db", keep_rollouts=False) as journal:
        for group_id in range(300):
            ids = [f"{group_id}/{i}" for i in range(3)]
            ledgers.admitted(group_id, ids)
            journal.admitted(group(group_id), ids)
            flying.append(group_id)
            if chance.random() < 0.2:
                continue
            ending = flying.pop(chance.randrange(len(flying)))
            for index in range(chance.randrange(4)):
                failed = chance.random() < 0.3
                journal.rollout_ended(
                    rollout(ending, index, "failed" if failed else "finished", "timeout" if failed else "")
                )
                if failed:
                    ledgers.rollouts.end(f"{ending}/{index}", "failed", "timeout")
            state, reason, step = chance.choice(
                [("trained", "", 4), ("dropped", "stale", None), ("dropped", "equal", None), ("failed", "engine", None)]
            )
            ledgers.group_ended(ending, state, reason)
            journal.group_ended(ending, state, reason, step)
            if group_id % 100 == 0:
                assert committed(journal) == ledgers.as_dict()
        ledgers.check()
        journal.flush()
        with open_readonly(tmp_path / "journal.db") as reader:
            assert reader.counts() == ledgers.as_dict() == committed(journal)
    assert not (tmp_path / "segments").exists()


def prompts(path: Path, reason: str) -> list[str]:
    """The prompts of the groups that were dropped for this reason."""
    with open_readonly(path) as reader:
        found = reader.rows("SELECT prompt FROM groups WHERE state = 'dropped' AND reason = ? ORDER BY id", reason)
    return [row["prompt"] for row in found]


def test_recover_closes_the_books(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with Journal(path) as journal:
        empty = journal.recover(step=0)
        assert (empty.next_group, empty.last_version, empty.resume_step, empty.unfinished) == (0, -1, 0, [])
        for group_id in range(5):
            journal.admitted(group(group_id), [f"{group_id}/0", f"{group_id}/1"])
            journal.rollout_ended(rollout(group_id, 0, "failed", "timeout"))
        journal.group_ended(0, "trained", step=1)
        journal.group_ended(1, "dropped", "stale")
        journal.group_ended(4, "trained", step=2)
        for step in (1, 2):
            journal.step(
                StepRecord(
                    step=step, version=step, objective="policy", groups=1, rollouts=1, tokens=1, trained_tokens=1
                ),
                {},
            )
        journal.version(Version(id=8, parent=7, step=2, digest=0))
    with Journal(path, keep_rollouts=False) as journal:
        found = journal.recover(step=2)
        assert (found.next_group, found.last_version, found.resume_step) == (5, 8, 2)
        assert prompts(path, "interrupted") == ["prompt-2", "prompt-3"]
        assert found.groups.in_flight == found.rollouts.in_flight == 0
        assert found.groups.reasons["dropped"] == {"stale": 1, "interrupted": 2}
        assert found.rollouts.failed == 5 and found.rollouts.trained == 2 and found.rollouts.dropped == 3
        found.groups.check("groups")
        found.rollouts.check("rollouts")
        assert Ledgers(found.groups, found.rollouts).as_dict() == committed(journal)
        assert journal.recover(step=2) == found, "nothing is left to close"
        back = journal.recover(step=1)
        assert (back.resume_step, back.last_version, prompts(path, "rolled back")) == (1, 8, ["prompt-4"])
        assert back.groups.reasons["dropped"] == {"stale": 1, "interrupted": 2, "rolled back": 1}
        assert back.groups.trained == back.rollouts.trained == 1
        back.groups.check("groups")


def test_recover_forgets_locations_whose_bytes_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with Journal(path) as journal:
        journal.admitted(group(0), ["0/0", "0/1"])
        journal.rollout_ended(rollout(0, 0))
        journal.rollout_ended(rollout(0, 1))
    segment = tmp_path / "segments" / "000001.seg"
    segment.write_bytes(segment.read_bytes()[:-3])
    with Journal(path, keep_rollouts=False) as journal:
        journal.recover(step=0)
    with open_readonly(path) as reader:
        assert [kept.id for kept in reader.rollouts()] == ["0/0"]
        assert reader.counts()["rollouts"]["dropped"] == 2


def test_what_moves_twice_is_an_error_of_the_next_call(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.admitted(group(0), ["0/0"])
    journal.group_ended(0, "trained", step=1)
    journal.flush()
    journal.group_ended(0, "dropped", "stale")
    with pytest.raises(HeadraceError, match="group 0 cannot become dropped, it is not in flight"):
        journal.flush()
    with pytest.raises(HeadraceError, match="group 0 cannot become dropped"):
        journal.meta("more", 1)
    journal.close()  # the failure was told
    with open_readonly(tmp_path / "journal.db") as reader:
        assert reader.counts()["groups"]["trained"] == 1


def test_a_failure_that_nobody_saw_is_raised_by_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.rollout_ended(rollout(0, 0))
    with pytest.raises(HeadraceError, match="rollout 0/0 ended but was not in flight"):
        journal.close()


def test_an_end_needs_its_step_or_its_reason(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        with pytest.raises(HeadraceError, match="trained needs a step"):
            journal.group_ended(0, "trained")
        with pytest.raises(HeadraceError, match="dropped needs a reason"):
            journal.group_ended(0, "dropped")


def test_nothing_is_taken_after_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    journal.close()
    journal.close()
    with pytest.raises(HeadraceError, match="closed"):
        journal.meta("key", 1)


def test_a_client_that_holds_the_lock_too_long_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    journal = Journal(tmp_path / "journal.db")
    other = sqlite3.connect(tmp_path / "journal.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.meta("key", 1)
    with pytest.raises(HeadraceError, match=r"journal\.db cannot be written: database is locked"):
        journal.flush()
    other.close()
    journal.close()


def test_a_full_disk_is_an_error_of_the_next_call(tmp_path: Path) -> None:
    """A real limit of the operating system on the size of a file."""
    script = """
        import resource, sys
        from pathlib import Path
        from headrace.buffer.journal import Journal
        from headrace.errors import HeadraceError
        journal = Journal(Path(sys.argv[1]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        try:
            for i in range(10_000):
                journal.meta(f"key {i}", "x" * 1000)
                if i % 100 == 0:
                    journal.flush()
        except HeadraceError as error:
            print(error)
            sys.exit(7)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "journal.db")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stdout.count("\n") == 1 and "journal.db cannot be written: " in done.stdout
    with Journal(tmp_path / "journal.db") as journal:
        journal.meta("after", 1)


def test_clear_errors_at_opening(tmp_path: Path) -> None:
    text = tmp_path / "text" / "journal.db"
    text.parent.mkdir()
    text.write_text("this is a text, not a database, and long enough to be a header of one" * 10)
    for opening in (Journal, open_readonly):
        with pytest.raises(UserError, match="cannot be opened as a journal: file is not a database"):
            opening(text)
    foreign = tmp_path / "foreign.db"
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(UserError, match="not a journal of Headrace"):
        Journal(foreign)
    Journal(tmp_path / "new.db").close()
    db = sqlite3.connect(tmp_path / "new.db", isolation_level=None)
    db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.close()
    for opening in (Journal, open_readonly):
        with pytest.raises(UserError, match=r"schema 99, but .* reads schema 3 and, of earlier runs, 2"):
            opening(tmp_path / "new.db")
    with pytest.raises(UserError, match=r"is not a run directory: it has no missing\.db"):
        open_readonly(tmp_path / "missing.db")
    with pytest.raises(UserError, match="cannot be opened as a journal"):
        Journal(foreign / "journal.db")


def test_a_live_run_holds_its_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.db")
    with pytest.raises(UserError, match=rf"in use by a live run \(process {os.getpid()}\)"):
        Journal(tmp_path / "journal.db")
    journal.close()
    Journal(tmp_path / "journal.db").close()


WRITER = """
    import itertools, random, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_journal import group, rollout
    from headrace.buffer.journal import Journal

    chance, flying = random.Random(int(sys.argv[3])), []
    journal = Journal(Path(sys.argv[1]))
    recovered = journal.recover(step=1)
    print("ready", flush=True)
    for group_id in itertools.count(recovered.next_group):
        journal.admitted(group(group_id), [f"{group_id}/{i}" for i in range(3)])
        flying.append(group_id)
        if len(flying) < 4:
            continue
        ended = flying.pop(chance.randrange(4))
        for i in range(3):
            failed = chance.random() < 0.3
            journal.rollout_ended(rollout(ended, i, "failed" if failed else "finished", "timeout" if failed else ""))
        ends = [("trained", "", 1), ("dropped", "stale", None), ("failed", "engine", None)]
        journal.group_ended(ended, *chance.choice(ends))
        if group_id == recovered.next_group + 8:
            journal.flush()
            print("committed", flush=True)
"""


def test_the_ledgers_balance_after_kill_9(tmp_path: Path) -> None:
    path, chance, admitted = tmp_path / "journal.db", random.Random(), 0
    for life in range(4):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(Path(__file__).parent), str(life)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        with pytest.raises(UserError, match="in use by a live run"):
            Journal(path)
        assert process.stdout.readline() == b"committed\n"
        time.sleep(chance.uniform(0.0, 0.8))
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        process.stdout.close()
        with Journal(path, keep_rollouts=False) as journal:
            found = journal.recover(step=1)
            found.groups.check("groups")
            found.rollouts.check("rollouts")
            assert found.groups.in_flight == found.rollouts.in_flight == 0
            assert found.rollouts.admitted == 3 * found.groups.admitted
            assert found.groups.admitted >= admitted + 9 and found.next_group == found.groups.admitted
            admitted = found.groups.admitted
    with open_readonly(path) as reader:
        # A rollout shares its group's end unless it failed by itself, and every kept row can be read back.
        (wrong,) = reader.rows(
            "SELECT COUNT(*) AS n FROM rollouts r JOIN groups g ON g.id = r.group_id"
            " WHERE r.state != g.state AND r.state != 'failed'"
        )
        (kept,) = reader.rows("SELECT COUNT(*) AS n FROM rollouts WHERE segment IS NOT NULL")
        assert wrong["n"] == 0 and kept["n"] > 0
        assert sum(1 for item in reader.rollouts() if item.traces[0].token_ids[-1] == 8) == kept["n"]


def test_twenty_thousand_rollouts(tmp_path: Path) -> None:
    """Far more than the queue holds: the caller is slowed down, nothing is lost."""
    with Journal(tmp_path / "journal.db") as journal:
        for group_id in range(2500):
            journal.admitted(group(group_id), [f"{group_id}/{i}" for i in range(8)])
            for i in range(8):
                journal.rollout_ended(rollout(group_id, i))
            journal.group_ended(group_id, "trained", step=group_id // 16 + 1)
        counts = committed(journal)
    assert counts["groups"]["trained"] == 2500 and counts["rollouts"]["trained"] == 20_000
    with open_readonly(tmp_path / "journal.db") as reader:
        assert {item.id for item in reader.rollouts("group_id = 2499")} == {f"2499/{i}" for i in range(8)}

"""The ledgers in SQL against counts made by hand, and every way in which they can contradict themselves."""

from pathlib import Path

import pytest
from journals import JournalMaker

from headrace.errors import DataError
from headrace.observe.summary import describe_ledgers
from headrace.review.summary import read_ledgers


@pytest.fixture
def books(journal: JournalMaker) -> JournalMaker:
    """Six groups of two rollouts: two trained in each of two steps, one dropped, one failed, one in flight."""
    journal.meta(name="books", outcome="running")
    group = 0
    for step in (1, 2):
        for _ in range(2 if step == 1 else 1):
            journal.add("groups", id=group, state="trained", step=step)
            journal.add("rollouts", id=f"{group}/0", group_id=group, state="trained", step=step, sampled_tokens=5)
            if group == 1:
                journal.add("rollouts", id="1/1", group_id=1, state="failed", reason="timeout", sampled_tokens=2)
            else:
                journal.add("rollouts", id=f"{group}/1", group_id=group, state="trained", step=step, sampled_tokens=6)
            group += 1
    journal.add("steps", step=1, groups=2, rollouts=3)
    for process, reason, tokens in (
        ("engine-0", "killed", 5), ("engine-0", "killed", 6), ("controller", "resumed", 9), ("controller", "other", 10),
    ):  # fmt: skip
        journal.add("restarts", process=process, reason=reason, regenerated_tokens=tokens, time=1.0)
    journal.add("steps", step=2, groups=1, rollouts=2)
    journal.add("steps", step=-1, objective="imitation", groups=0, rollouts=8)
    for state, reason in (("dropped", "stale"), ("failed", "all failed"), ("in_flight", "")):
        journal.add("groups", id=group, state=state, reason=reason)
        for index in range(2):
            journal.add("rollouts", id=f"{group}/{index}", group_id=group, state=state, reason=reason, sampled_tokens=1)
        group += 1
    return journal


def test_the_counts_are_those_made_by_hand(books: JournalMaker) -> None:
    assert read_ledgers(books.run_dir) == {
        "name": "books",
        "outcome": "running",
        "groups": {
            "admitted": 6, "trained": 3, "dropped": 1, "failed": 1, "in_flight": 1,
            "reasons": {"dropped": {"stale": 1}, "failed": {"all failed": 1}},
        },
        "rollouts": {
            "admitted": 12, "trained": 5, "dropped": 2, "failed": 3, "in_flight": 2,
            "reasons": {"dropped": {"stale": 2}, "failed": {"all failed": 2, "timeout": 1}},
        },
        "sampled_tokens": {"trained": 5 + 6 + 5 + 5 + 6, "dropped": 2, "failed": 4, "in_flight": 2},
        "regenerated_tokens": 30,
        "restarts": {"controller": 1, "engine-0": 2},
        "balanced": True,
        "problems": [],
    }  # fmt: skip


def test_people_read_equations(books: JournalMaker) -> None:
    text = describe_ledgers(read_ledgers(books.run_dir)).splitlines()
    assert text[0] == "run       books (running)"
    assert text[1] == "groups    6 admitted = 3 trained + 1 dropped + 1 failed + 1 in flight"
    assert [" ".join(line.split()) for line in text[2:4]] == ["1 dropped: stale", "1 failed: all failed"]
    assert text[-2] == "restarts  controller 1, engine-0 2; 30 tokens sampled again"
    assert text[-3] == "tokens    35 sampled: 27 trained, 2 dropped, 4 failed, 2 in flight"
    assert text[-1] == "balanced"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("UPDATE groups SET reason = '' WHERE id = 3", "1 groups ended without a reason: 3"),
        ("UPDATE rollouts SET reason = '' WHERE state = 'failed'", "3 rollouts ended without a reason: 1/1, 4/0, 4/1"),
        ("UPDATE rollouts SET group_id = 77 WHERE id = '0/1'", "1 rollouts without a group: 0/1"),
        ("UPDATE rollouts SET state = 'in_flight' WHERE id = '3/0'", "1 rollouts that disagree with their group: 3/0"),
        (
            "UPDATE rollouts SET step = NULL WHERE id = '2/1'",
            "1 rollouts with a step but not trained, or the reverse: 2/1",
        ),
        ("UPDATE groups SET step = 1 WHERE id = 2", "2 steps that trained other groups than the ledger says: 1, 2"),
        ("DELETE FROM rollouts WHERE id = '2/0'", "1 steps that trained other rollouts than the ledger says: 2"),
        ("UPDATE rollouts SET reason = ''", "5 rollouts ended without a reason: 1/1, 3/0, 3/1, ..."),
    ],
)
def test_a_contradiction_is_named(books: JournalMaker, change: str, problem: str) -> None:
    books.db.execute(change)
    found = read_ledgers(books.run_dir)
    assert not found["balanced"]
    assert problem in found["problems"]
    assert describe_ledgers(found).splitlines()[-len(found["problems"]) - 1] == "NOT balanced:"


def test_a_group_that_is_trained_but_whose_step_is_not_written_yet_is_no_contradiction(books: JournalMaker) -> None:
    books.db.execute("DELETE FROM steps WHERE step = 2")
    assert read_ledgers(books.run_dir)["balanced"]


def test_a_directory_without_a_journal_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a run directory: it has no journal\.db"):
        read_ledgers(tmp_path)

"""What a dead run left: trained again, kept ready, continued, or closed with a reason; nothing twice, nothing lost."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from committed_ledgers import committed
from hypothesis import given
from hypothesis import strategies as st

from headrace.buffer.journal import Journal, open_readonly
from headrace.buffer.ledger import Ledgers
from headrace.buffer.window import Window
from headrace.channel.codec import encode
from headrace.observe.records import StepRecord
from headrace.types import Group, Prompt, Rollout, Trace, Version, without_republished


def trace(tokens: Sequence[int], version: int = 0, context: int = 1) -> Trace:
    n = len(tokens)
    trained = np.arange(n) >= context
    return Trace(
        token_ids=np.array(tokens, np.int32),
        trained=trained,
        logprobs=np.where(trained, -0.5, 0).astype(np.float32),
        versions=np.where(trained, version, -1).astype(np.int32),
    )


def admit(journal: Journal, group_id: int, version: int = 0) -> None:
    group = Group(id=group_id, prompt=Prompt(id=f"p{group_id}", text="x"), version=version)
    journal.admitted(group, [f"{group_id}/0", f"{group_id}/1"])


def complete(journal: Journal, group_id: int) -> None:
    for index in range(2):
        tokens = trace([group_id, 7, 8 + index])
        journal.rollout_ended(
            Rollout(id=f"{group_id}/{index}", index=index, traces=[tokens], ending="finished", reward=float(index))
        )


def train(journal: Journal, step: int, group_id: int) -> None:
    journal.group_ended(group_id, "trained", step=step)
    journal.step(
        StepRecord(step=step, version=step - 1, objective="policy", groups=1, rollouts=2, tokens=6, trained_tokens=4),
        {},
    )
    journal.version(Version(id=step, parent=step - 1, step=step, digest=step))


def dead_run(path: Path, *, keep: bool = True) -> None:
    """Steps 1 to 5 on groups 0, 1, 2, 3, 5; group 4 is complete, 6 is being sampled, 7 has just begun."""
    with Journal(path, keep_rollouts=keep) as journal:
        journal.version(Version(id=0, parent=-1, step=0, digest=0))
        for group_id in range(8):
            admit(journal, group_id, version=max(0, group_id - 3))
        for group_id in range(6):
            complete(journal, group_id)
        for step, group_id in enumerate([0, 1, 2, 3, 5], start=1):
            train(journal, step, group_id)
        for index, parts in enumerate([([6, 7], [8]), ([6],)]):
            for number, tokens in enumerate(parts):
                part = trace(tokens, version=4, context=0 if number else 1)
                journal.partial(Rollout(id=f"6/{index}", index=index, traces=[part], ending="aborted"))


def test_a_run_goes_on_with_everything_that_it_had(tmp_path: Path) -> None:
    dead_run(tmp_path / "journal.db")
    with Journal(tmp_path / "journal.db") as journal:
        found = journal.recover(step=2)
        assert (found.resume_step, found.next_group, found.last_version, found.groups.dropped) == (5, 8, 5, 0)
        assert found.republished == [6], "step 5 was published as 5, and will be again as 6"
        assert [(left.group.id, left.complete, left.group.version) for left in found.unfinished] == [
            (4, True, 1), (6, False, 3), (7, False, 4),
        ]  # fmt: skip
        assert found.overtakers == [5]
        ready, running, begun = found.unfinished
        assert [rollout.reward for rollout in ready.group.rollouts] == [0.0, 1.0]
        [first], [second] = running.partial["6/0"], running.partial["6/1"]
        assert first.token_ids.tolist() == [6, 7, 8]
        assert first.versions.tolist() == [-1, 4, 4]
        assert second.token_ids.tolist() == [6]
        assert begun.partial == {}
        ledgers = Ledgers(found.groups, found.rollouts)
        for left in found.unfinished:
            ledgers.admitted(left.group.id, left.members)
        assert ledgers.as_dict() == committed(journal)
        ledgers.check()
        twice = journal.recover(step=2)
        assert [encode(left) for left in twice.unfinished] == [encode(left) for left in found.unfinished]
        assert (twice.groups, twice.rollouts, twice.resume_step) == (found.groups, found.rollouts, found.resume_step)


@pytest.mark.parametrize(
    ("publish_every", "reach", "again"), [(2, 4, [4, 5, 6, 7]), (4, 4, [4, 5, 6, 7]), (5, 5, [4, 6, 7])]
)
def test_whole_versions_are_trained_again_and_the_rest_is_ready(
    tmp_path: Path, publish_every: int, reach: int, again: list[int]
) -> None:
    dead_run(tmp_path / "journal.db")
    with Journal(tmp_path / "journal.db") as journal:
        found = journal.recover(step=0, publish_every=publish_every)
        assert found.resume_step == reach
        assert [left.group.id for left in found.unfinished] == again
        assert all(left.complete == (left.group.id < 6) for left in found.unfinished)
        # What is ready again can be trained again, once.
        if 5 in again:
            journal.group_ended(5, "trained", step=5)
        journal.flush()


def test_without_tokens_the_books_are_closed(tmp_path: Path) -> None:
    dead_run(tmp_path / "journal.db", keep=False)
    with Journal(tmp_path / "journal.db", keep_rollouts=False) as journal:
        found = journal.recover(step=2)
        assert (found.resume_step, found.unfinished) == (2, [])
        with open_readonly(tmp_path / "journal.db") as reader:
            dropped = reader.rows("SELECT prompt FROM groups WHERE state = 'dropped' ORDER BY id")
        assert [row["prompt"] for row in dropped] == ["p2", "p3", "p4", "p5", "p6", "p7"]
        assert found.groups.reasons["dropped"] == {"rolled back": 3, "interrupted": 3}
        assert found.groups.trained == 2
        assert committed(journal) == Ledgers(found.groups, found.rollouts).as_dict()


def test_lost_bytes_end_the_reach_there(tmp_path: Path) -> None:
    dead_run(tmp_path / "journal.db")
    with open_readonly(tmp_path / "journal.db") as reader:
        (row,) = reader.rows("SELECT offset FROM rollouts WHERE id = '3/1'")
    segment = tmp_path / "segments" / "000001.seg"
    segment.write_bytes(segment.read_bytes()[: row["offset"] + 3])
    with Journal(tmp_path / "journal.db") as journal:
        found = journal.recover(step=1)
        assert found.resume_step == 3
        assert found.groups.reasons["dropped"] == {"rolled back": 2}, "3, whose tokens are gone, and 5 after it"
        assert [(left.group.id, left.complete, left.partial) for left in found.unfinished] == [
            (4, False, {}), (6, False, {}), (7, False, {}),
        ]  # fmt: skip


def test_a_group_cut_while_it_was_written_is_judged_again(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        admit(journal, 0)
        tokens = trace([5, 7, 63])
        journal.rollout_ended(Rollout(id="0/1", index=1, traces=[tokens], ending="finished", reward=1.0))
    for _ in range(2):
        with Journal(tmp_path / "journal.db") as journal:
            (left,) = journal.recover(step=0).unfinished
            assert not left.complete and left.members == ["0/0", "0/1"]
            [saved] = left.partial["0/1"]
            assert saved.token_ids.tolist() == [5, 7, 63]
    with Journal(tmp_path / "journal.db") as journal:
        journal.rollout_ended(Rollout(id="0/1", index=1, traces=[tokens], ending="finished", reward=1.0))
        journal.flush()
        with open_readonly(tmp_path / "journal.db") as reader:
            assert reader.rows("SELECT * FROM partials") == []


def test_a_rollout_goes_on_in_all_its_traces(tmp_path: Path) -> None:
    """Its second trace begins later than the first, and the third has nothing yet."""
    parts = [[[1, 2]], [[3], [10]], [[], [11, 12], []], [[4], [13], [], [30]]]
    with Journal(tmp_path / "journal.db") as journal:
        admit(journal, 0)
        for number, part in enumerate(parts):
            traces = [trace(tokens, version=number, context=0) for tokens in part]
            journal.partial(Rollout(id="0/0", index=0, traces=traces, ending="aborted"))
        two = [trace([5, 6]), trace([7, 8, 9])]
        journal.rollout_ended(Rollout(id="0/1", index=1, traces=two, ending="finished", reward=1.0))
    for _ in range(2):
        with Journal(tmp_path / "journal.db") as journal:
            (left,) = journal.recover(step=0).unfinished
            running, ended = left.partial["0/0"], left.partial["0/1"]
            assert [one.token_ids.tolist() for one in running] == [[1, 2, 3, 4], [10, 11, 12, 13], [], [30]]
            assert [one.versions.tolist() for one in running] == [[0, 0, 1, 3], [1, 2, 2, 3], [], [3]]
            assert [one.token_ids.tolist() for one in ended] == [[5, 6], [7, 8, 9]]
    with open_readonly(tmp_path / "journal.db") as reader:
        sizes = reader.rows("SELECT rollout, trace, SUM(tokens) AS n FROM partials GROUP BY rollout, trace")
        assert [tuple(row.values()) for row in sizes] == [
            ("0/0", 0, 4), ("0/0", 1, 4), ("0/0", 3, 1), ("0/1", 0, 2), ("0/1", 1, 3),
        ]  # fmt: skip
    with Journal(tmp_path / "journal.db") as journal:
        journal.partial_discarded("0/0")
        journal.rollout_ended(Rollout(id="0/1", index=1, traces=two, ending="finished", reward=1.0))
        journal.flush()
        with open_readonly(tmp_path / "journal.db") as reader:
            assert reader.rows("SELECT * FROM partials") == []


def test_parts_that_a_power_failure_took_are_forgotten_and_what_follows_is_kept(tmp_path: Path) -> None:
    def save(journal: Journal, *traces: list[int]) -> None:
        parts = [trace(tokens, context=0) for tokens in traces]
        journal.partial(Rollout(id="0/0", index=0, traces=parts, ending="aborted"))

    with Journal(tmp_path / "journal.db") as journal:
        admit(journal, 0)
        save(journal, [1], [5])
        save(journal, [2], [6])
    segment = tmp_path / "segments" / "000001.seg"
    segment.write_bytes(segment.read_bytes()[:-3])
    with Journal(tmp_path / "journal.db") as journal:
        (left,) = journal.recover(step=0).unfinished
        assert [one.token_ids.tolist() for one in left.partial["0/0"]] == [[1], [5]]
        save(journal, [3, 3, 3], [7])
    with Journal(tmp_path / "journal.db") as journal:
        (left,) = journal.recover(step=0).unfinished
        assert [one.token_ids.tolist() for one in left.partial["0/0"]] == [[1, 3, 3, 3], [5, 7]]


def test_a_failed_rollout_without_a_trace_does_not_stop_a_recovery(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        admit(journal, 0)
        journal.rollout_ended(Rollout(id="0/1", index=1, traces=[], ending="failed", reason="timeout"))
    with Journal(tmp_path / "journal.db") as journal:
        (left,) = journal.recover(step=0).unfinished
        assert (left.members, left.partial) == (["0/0", "0/1"], {})


def test_a_complete_group_is_judged_again_with_what_filters_had_left_out(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        for group_id in range(2):
            admit(journal, group_id)
            complete(journal, group_id)
        journal.rollout_dropped("1/0", "overlong")
        journal.group_ended(0, "dropped", "zero_variance")
        journal.meta("drawn", 9)
    for _ in range(2):
        with Journal(tmp_path / "journal.db") as journal:
            found = journal.recover(step=0)
            (left,) = found.unfinished
            assert left.complete and left.members == ["1/0", "1/1"] and len(left.group.rollouts) == 2
            assert found.outcomes == [(0, "p0", 1, 2)], "what is left counts when it is judged"
            assert journal.recover(step=0, outcomes=False).outcomes == []
            assert found.drawn == 9
            assert (found.rollouts.admitted, found.rollouts.dropped) == (2, 2), "those of group 0"
    with Journal(tmp_path / "journal.db") as journal:
        journal.rollout_dropped("1/0", "overlong")
        journal.group_ended(1, "trained", step=1)
        journal.flush()
        counts = committed(journal)["rollouts"]
        assert (counts["trained"], counts["dropped"], counts["in_flight"]) == (1, 3, 0)


FULL = """
    import resource, sys
    from pathlib import Path
    sys.path.insert(0, {here!r})
    from test_recovery import admit, complete
    from headrace.buffer.journal import Journal
    from headrace.errors import HeadraceError

    journal = Journal(Path({path!r}))
    admit(journal, 0)
    complete(journal, 0)
    journal.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    try:
        for group_id in range(1, 100_000):
            admit(journal, group_id)
            complete(journal, group_id)
            if group_id % 50 == 0:
                journal.flush()
    except HeadraceError as error:
        print(error)
        try:
            journal.close()
        except HeadraceError as again:
            print("again:", again)
"""


def test_a_disk_that_is_full_is_one_line_and_the_last_commit_stands(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    script = textwrap.dedent(FULL).format(here=str(Path(__file__).parent), path=str(path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert f"the journal {path} cannot be written: " in line
    with Journal(path) as journal:
        found = journal.recover(step=0)
        assert found.unfinished[0].group.id == 0 and found.unfinished[0].complete
        assert len(found.unfinished) == found.next_group, "every group that was committed is there"
        admit(journal, found.next_group)
        journal.flush()


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.data())
def test_a_new_id_for_the_same_weights_makes_no_token_older(again: list[bool], data: st.DataObject) -> None:
    """Versions in order, each either newly trained or published again: lag counts the trained ones only."""
    republished = [version for version, same in enumerate(again, start=1) if same]
    token = data.draw(st.integers(0, len(again)))
    newest = data.draw(st.integers(token, len(again)))
    trained = sum(not again[version - 1] for version in range(token + 1, newest + 1))
    lag = without_republished(newest, republished) - without_republished(np.array([token], np.int32), republished)
    assert lag.tolist() == [trained]


def test_slots_are_kept_until_the_weights_that_a_group_trained_are_proved(tmp_path: Path) -> None:
    window = Window(1, 1, versions=10)

    def sample(group_id: int, version: int) -> None:
        window.admit(group_id, version)
        rollout = Rollout(id=f"{group_id}/0", index=0, traces=[trace([1, 2], version)], ending="finished", reward=1.0)
        window.complete(Group(id=group_id, prompt=Prompt(id="p", text="x"), version=version, rollouts=[rollout]))

    sample(0, 0)
    sample(1, 0)
    assert window.take() is not None and window.trained_version == 1
    assert not window.may_admit(), "group 0 holds its slot until version 1 is proved"
    # The trainer dies in that step: version 0 comes back as 1, and what group 0 trains will be 2.
    assert window.republish(0) == 1
    window.release(1)
    assert not window.may_admit(), "1 is the weights of 0: group 0 is not in them"
    assert (window.version_of(0), window.trained_version) == (1, 2)
    window.release(2)
    sample(2, 2)
    for expected in (2, 3):
        assert window.trained_version == expected
        assert window.take() is not None, "no lag is over the bound because of an id"
    assert window.count(window.trained_version) == 3

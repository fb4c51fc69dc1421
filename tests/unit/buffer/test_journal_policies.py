"""What belongs to a policy says so: rows of the journal, ledgers, windows, batches."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.algorithms.assemble import assemble
from headrace.buffer.journal import Journal, open_readonly
from headrace.buffer.ledger import Ledgers
from headrace.buffer.window import Window
from headrace.errors import HeadraceError
from headrace.observe.records import DeliveryRecord, EvaluationRecord, SampleRecord, StepRecord
from headrace.types import POLICY, Group, Prompt, Rollout, Trace, Version

TABLES = ("versions", "deliveries", "groups", "steps", "evaluations", "samples", "schedule")


def group(group_id: int, policy: str = POLICY) -> Group:
    return Group(id=group_id, prompt=Prompt(id=f"p{group_id}", text="x"), version=0, policy=policy)


def two_policies(path: Path) -> None:
    """Groups 0 to 2 train a writer, 3 and 4 a critic; both have a version 0 and a step 1."""
    with Journal(path) as journal:
        for policy in ("writer", "critic"):
            journal.version(Version(id=0, parent=-1, step=0, digest=0, policy=policy))
            journal.delivery(DeliveryRecord(version=0, engine=f"{policy}-0", accepted=True, time=0.0), policy)
            journal.step(
                StepRecord(
                    step=1,
                    version=0,
                    objective="policy",
                    groups=1,
                    rollouts=1,
                    tokens=3,
                    trained_tokens=1,
                    loss=1.0 if policy == "writer" else 2.0,
                ),
                {},
                policy=policy,
            )
            journal.evaluation(
                EvaluationRecord(
                    version=0,
                    moment="before",
                    prompts=1,
                    samples=1,
                    pass_1=0.0,
                    pass_k=0.0,
                    reward_mean=0.0,
                    tokens_mean=1.0,
                    started=0.0,
                    ended=1.0,
                ),
                policy=policy,
            )
            journal.sample(
                SampleRecord(version=0, moment="before", prompt="p", question="q", answer="a", reward=None),
                policy=policy,
            )
            journal.scheduled("swap", version=0, engine=f"{policy}-0", policy=policy)
        for group_id in range(5):
            journal.admitted(group(group_id, "writer" if group_id < 3 else "critic"), [f"{group_id}/0"])
        journal.group_ended(0, "trained", step=1)
        journal.group_ended(3, "trained", step=1)
        journal.group_ended(4, "dropped", "surplus")


def test_every_table_tells_policies_apart(tmp_path: Path) -> None:
    two_policies(tmp_path / "journal.db")
    with open_readonly(tmp_path / "journal.db") as reader:
        for table in TABLES:
            found = {row["policy"] for row in reader.rows(f"SELECT policy FROM {table}")}
            assert found == {"writer", "critic"}, table
        losses = reader.rows("SELECT policy, loss FROM steps WHERE step = 1 ORDER BY policy")
        assert [tuple(row.values()) for row in losses] == [("critic", 2.0), ("writer", 1.0)]


def test_ledgers_are_counted_for_one_policy_and_for_all(tmp_path: Path) -> None:
    two_policies(tmp_path / "journal.db")
    with open_readonly(tmp_path / "journal.db") as reader:
        writer, critic, both = (reader.counts(policy) for policy in ("writer", "critic", None))
    for table in ("groups", "rollouts"):
        assert [writer[table][key] for key in ("admitted", "trained", "in_flight")] == [3, 1, 2]
        assert [critic[table][key] for key in ("admitted", "trained", "dropped")] == [2, 1, 1]
        assert critic[table]["reasons"] == {"dropped": {"surplus": 1}, "failed": {}}
        assert writer[table]["reasons"] == {"dropped": {}, "failed": {}}
        assert both[table]["admitted"] == 5
    ledgers = Ledgers()
    for group_id in (3, 4):
        ledgers.admitted(group_id, [f"{group_id}/0"])
    ledgers.group_ended(3, "trained")
    ledgers.group_ended(4, "dropped", "surplus")
    assert ledgers.as_dict() == critic


def test_a_group_that_was_in_flight_keeps_its_policy(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.db") as journal:
        journal.admitted(group(0, "writer"), ["0/0"])
    with Journal(tmp_path / "journal.db") as journal:
        (left,) = journal.recover(step=0, policy="writer").unfinished
        assert left.group == Group(id=0, prompt=Prompt(id="p0"), version=0, policy="writer")


def ended(group_id: int) -> Rollout:
    tokens = Trace.of_context(np.array([group_id, 1], np.int32))
    return Rollout(id=f"{group_id}/0", index=0, traces=[tokens], ending="finished", reward=1.0)


@pytest.mark.parametrize("keep_rollouts", [True, False])
def test_a_policy_is_recovered_by_itself(tmp_path: Path, keep_rollouts: bool) -> None:
    """The writer has trained step 1; the critic's versions are ahead, and its groups in between."""
    path = tmp_path / "journal.db"
    with Journal(path, keep_rollouts=keep_rollouts) as journal:
        for policy, versions in (("writer", 2), ("critic", 3)):
            for version in range(versions):
                journal.version(Version(id=version, parent=version - 1, step=version, digest=0, policy=policy))
        for group_id in range(6):
            journal.admitted(group(group_id, "critic" if group_id % 2 else "writer"), [f"{group_id}/0"])
            journal.partial(msgspec.structs.replace(ended(group_id), ending="aborted", reward=None))
        for group_id, policy, step in ((0, "writer", 1), (1, "critic", 1), (3, "critic", 2)):
            journal.rollout_ended(ended(group_id))
            journal.group_ended(group_id, "trained", step=step)
            journal.step(
                StepRecord(
                    step=step, version=step - 1, objective="policy", groups=1, rollouts=1, tokens=2, trained_tokens=0
                ),
                {},
                policy=policy,
            )
    critic = "SELECT * FROM groups JOIN rollouts ON group_id = groups.id WHERE policy = 'critic'"
    with open_readonly(path) as reader:
        before = [reader.rows(critic), reader.rows("SELECT * FROM steps WHERE policy = 'critic'")]
        before.append(reader.rows("SELECT * FROM partials WHERE rollout = '5/0'"))
    with Journal(path, keep_rollouts=keep_rollouts) as journal:
        found = journal.recover(step=0, policy="writer")
        assert (found.last_version, found.next_group) == (1, 6)
        assert found.groups.admitted == (1 if keep_rollouts else 3), "what is left of the writer is not counted yet"
        if keep_rollouts:
            assert (found.resume_step, found.republished, found.overtakers) == (1, [2], [])
            assert [left.group.id for left in found.unfinished] == [2, 4]
            assert found.outcomes == [(0, "p0", 1, 1)]
        else:
            assert (found.resume_step, found.unfinished, found.groups.dropped) == (0, [], 3)
    with open_readonly(path) as reader:
        after = [reader.rows(critic), reader.rows("SELECT * FROM steps WHERE policy = 'critic'")]
        after.append(reader.rows("SELECT * FROM partials WHERE rollout = '5/0'"))
        assert [one.id for one in reader.trained_groups(1, "critic")] == [1]
        assert [one.id for one in reader.trained_groups(1)] == ([0, 1] if keep_rollouts else [1])
        assert (reader.republished("critic"), reader.step(2, "critic") is None) == ([], False)
        assert reader.step(2, "writer") is None
        assert (reader.last_step("writer"), reader.last_step("critic"), reader.last_step()) == (found.resume_step, 2, 2)
    assert after == before, "the critic's groups, rollouts, steps and saved tokens are as they were"


def test_a_window_takes_the_groups_of_its_policy_only() -> None:
    window = Window(1, 1, policy="writer")
    window.admit(0, 0)
    with pytest.raises(HeadraceError, match="group 0 trains 'critic', and this is the window of 'writer'"):
        window.complete(group(0, "critic"))
    window.complete(group(0, "writer"))


def test_a_batch_is_of_the_policy_of_its_groups() -> None:
    shape = {"advantage": "grpo", "normalize": "token", "group_size": 1, "max_tokens": 8, "temperature": 1.0}
    groups = [group(0, "writer"), group(1, "writer")]
    with pytest.raises(ValueError, match="one batch trains one policy, not critic, writer"):
        assemble([*groups, group(2, "critic")], step=1, version=0, **shape)

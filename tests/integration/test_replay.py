"""An asynchronous run trained a second time from its journal: the same weights, to the bit."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from runs import headrace, small_config
from safetensors.numpy import load_file

from headrace import Run
from headrace.observe.progress import NoProgress
from headrace.pipeline.batches import recorded_batches, warm_start_batches
from headrace.pipeline.inputs import check_inputs
from headrace.pipeline.launch import start_run
from headrace.run_dir import RunDir

VERSIONS = 30


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(
        tmp_path_factory.mktemp("runs"), f"run.versions={VERSIONS}", "pipeline.record=true", "buffer.depth=2",
        "training.learning_rate=1e-3", "evaluate.prompts=0",
    )  # fmt: skip
    return start_run(config, NoProgress()).run_dir.path


def rows(run_dir: Path, sql: str) -> list[tuple]:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return db.execute(sql).fetchall()


@pytest.mark.slow
def test_thirty_asynchronous_versions_come_out_alike(recorded: Path) -> None:
    assert Run(recorded).summary["lag_max"] >= 1, "or it was not asynchronous"
    digests = [digest for (digest,) in rows(recorded, "SELECT digest FROM versions ORDER BY id")]
    assert len(digests) == VERSIONS + 1 == len(set(digests)), "every version has weights of its own"
    again = headrace("replay", str(recorded), "--json")
    assert again.returncode == 0, again.stdout + again.stderr
    found = json.loads(again.stdout)
    assert (found["identical"], found["versions"], found["steps"]) == (True, VERSIONS + 1, VERSIONS)
    assert found["replayed_digest"] == digests[-1]


@pytest.mark.slow
def test_the_last_weights_are_those_of_the_checkpoint_to_the_bit(recorded: Path) -> None:
    """Not by digest: every tensor of a trainer that saw the recorded batches, beside the file that the run saved."""
    from headrace.training.serving import build_trainer

    run_dir, config = RunDir.open(recorded)
    trainer = build_trainer(config, recorded / "no-checkpoint").trainer
    task, chat = check_inputs(config)
    for batch in warm_start_batches(config, task.task, chat, version=0):
        trainer.step(batch)
    for batch in recorded_batches(config, run_dir.journal, 0, VERSIONS):
        trainer.step(batch)
    saved = load_file(Run(recorded).model_dir / "model.safetensors")
    replayed = {name: tensor.detach().numpy() for name, tensor in trainer.weights().items()}
    assert saved.keys() <= replayed.keys() and len(saved) > 10
    for name, values in saved.items():
        np.testing.assert_array_equal(values.view(np.uint32), replayed[name].view(np.uint32), err_msg=name)


@pytest.mark.slow
def test_the_schedule_is_in_the_order_in_which_it_happened(recorded: Path) -> None:
    events = rows(recorded, "SELECT event, group_id, step, version FROM schedule ORDER BY id")
    seen: dict[str, list[int]] = {"admit": [], "complete": [], "consume": []}
    proved, consumed = -1, 0
    for event, group_id, step, version in events:
        if event == "swap":
            assert version == proved + 1
            proved = version
            continue
        before = {"admit": None, "complete": "admit", "consume": "complete"}[event]
        assert before is None or group_id in seen[before]
        assert group_id not in seen[event]
        seen[event].append(group_id)
        if event == "admit":
            assert version == proved
        if event == "consume":
            assert step - 1 == consumed // 4 and version == step - 1
            consumed += 1
    assert proved == VERSIONS and len(seen["consume"]) == 4 * VERSIONS == len(seen["admit"])


@pytest.mark.slow
def test_a_recorded_step_that_was_changed_is_found(recorded: Path, tmp_path: Path) -> None:
    """Two groups trade places between two steps: from there on the weights are others, and the first is named."""
    copied = shutil.copytree(recorded, tmp_path / "run")
    with sqlite3.connect(copied / "journal.db") as db:
        # One that teaches something: a group whose rewards are all alike has no gradient.
        ((first, step),) = db.execute(
            """
            SELECT groups.id, groups.step FROM groups JOIN rollouts ON rollouts.group_id = groups.id
            WHERE groups.step BETWEEN 10 AND 29
            GROUP BY groups.id HAVING MIN(reward) <> MAX(reward) ORDER BY groups.step, groups.id LIMIT 1
            """
        ).fetchall()
        ((second,),) = db.execute("SELECT MIN(id) FROM groups WHERE step = ?", (step + 1,)).fetchall()
        db.execute("DELETE FROM schedule")
        for group_id, other in ((first, step + 1), (second, step)):
            db.execute("UPDATE groups SET step = ?, checksum = NULL WHERE id = ?", (other, group_id))
            db.execute("UPDATE rollouts SET step = ?, checksum = NULL WHERE group_id = ?", (other, group_id))
    again = headrace("replay", str(copied), "--json")
    found = json.loads(again.stdout)
    assert (again.returncode, found["identical"]) == (1, False)
    assert found["other"][0] == step

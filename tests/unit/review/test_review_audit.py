"""An audit against weights whose log-probabilities are known: what it compares, what it cannot, what is wrong."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path

import pytest
from recorded_runs import ConstantWeights, RunMaker, digest_of, trace

from headrace.observe.records import DeliveryRecord
from headrace.review.audit import CHANGED_MODEL, KEPT_CACHE, NO_CHECKPOINT, audit, describe_audit
from headrace.types import Version


def test_errors_lag_and_proofs_by_version(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    for version in (1, 2, 3):
        run.version(version)
    run.checkpoint(1)
    run.checkpoint(3)
    run.step(1, version=2)
    run.step(2, version=3)
    # Errors under the checkpoints: version 1: 0, 0.25, 0.5, 0; version 3: 0.125.
    run.rollout(trace([(5, -1.0, 1), (6, -1.25, 1), (7, -0.5, 1)]), step=1)
    run.rollout(trace([(5, -1.0, 1), (6, -9.0, 2), (7, -9.0, 2), (8, -1.125, 3)]), step=2)
    run.rollout(trace([(5, -9.0, 2)]), step=2)
    found = audit(run.close(), ConstantWeights, tolerance=0.5)

    assert (found.recorded, found.checkable, found.drawn) == (3, 2, 2), "a rollout of version 2 alone is not drawn"
    one, two, three = found.versions
    assert (one.version, one.weights, one.tokens) == (1, "step-00000001", 4)
    assert (one.mean_error, one.max_error) == (pytest.approx(0.75 / 4), 0.5)
    # Three tokens at lag 2 - 1, one at lag 3 - 1.
    assert (one.lag_mean, one.lag_max) == (pytest.approx(5 / 4), 2)
    assert (two.weights, two.tokens, two.max_error, two.lag_mean, two.lag_max) == (None, 0, None, 1.0, 1)
    assert (three.tokens, three.mean_error, three.lag_max) == (1, 0.125, 0)
    assert [entry.accepted for entry in found.versions] == [1, 1, 1]
    assert three.canary_error == pytest.approx(3e-6)
    assert found.not_checkable == {NO_CHECKPOINT: 2}
    assert found.compared == 5 and found.problems == [] and found.passed
    assert "passed: 5 tokens, no error over 0.5" in describe_audit(found)
    assert "not checkable: 2 tokens, their version has no checkpoint" in describe_audit(found)


def test_an_error_over_the_tolerance_names_the_rollout_and_its_worst_token(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    run.version(1)
    run.checkpoint(1)
    run.rollout(trace([(5, -1.0, 1), (6, -1.0, 1)]))
    run.rollout(trace([(5, -1.0, 1), (6, -1.25, 1), (7, -1.5, 1)]))
    found = audit(run.close(), ConstantWeights, tolerance=0.1)
    assert not found.passed
    assert found.problems == [
        "rollout 1/0: token 6 of trace 0, sampled by version 1, is recorded with -1.500000, but its checkpoint gives "
        "-1.000000 (error 0.5; 2 of 3 tokens over 0.1)"
    ]
    assert "FAILED" in describe_audit(found)


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_what_is_not_a_number_is_wrong(tmp_path: Path, broken: float) -> None:
    run = RunMaker(tmp_path)
    run.version(1)
    run.checkpoint(1)
    run.rollout(trace([(5, broken, 1)]))
    found = audit(run.close(), ConstantWeights, tolerance=1e9)
    assert len(found.problems) == 1 and found.versions[0].max_error == float("inf")


def test_the_temperature_of_sampling_counts(tmp_path: Path) -> None:
    run = RunMaker(tmp_path, rollouts__temperature="0.5")
    run.version(1)
    run.checkpoint(1)
    run.rollout(trace([(5, -2.0, 1)]))
    assert audit(run.close(), ConstantWeights).passed


def test_the_draw_is_seeded_and_as_large_as_asked(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    run.version(1)
    run.checkpoint(1)
    for index in range(40):
        run.rollout(trace([(5, -1.0 - index, 1)]))
    run_dir = run.close()
    draw = partial(audit, run_dir, ConstantWeights, samples=5, tolerance=0.5)
    first = draw(seed=1)
    assert first.drawn == 5 and first.versions[0].tokens == 5
    assert draw(seed=1).problems == first.problems
    assert draw(seed=2).problems != first.problems
    assert audit(run_dir, ConstantWeights, samples=1000).drawn == 40


def test_weights_are_loaded_once_a_version_and_only_where_needed(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    for version in (1, 2, 3):
        run.version(version)
        run.checkpoint(version)
    for version in (3, 1, 3):
        run.rollout(trace([(5, -1.0, version)]))
    ConstantWeights.loaded.clear()
    assert audit(run.close(), ConstantWeights).passed
    assert ConstantWeights.loaded == ["step-00000001", "step-00000003"]


def test_without_checkpoints_nothing_passes(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    run.version(1)
    run.rollout(trace([(5, -1.0, 1), (6, -1.0, 1)]))
    found = audit(run.close(), ConstantWeights)
    assert not found.passed and found.problems == [] and found.not_checkable == {NO_CHECKPOINT: 2}
    assert describe_audit(found).endswith("nothing was compared")
    assert "checkpoint_every" in describe_audit(found)


def test_a_checkpoint_with_other_weights_than_published_is_a_problem(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    run.journal.version(Version(id=1, parent=0, step=1, digest=digest_of(9)))
    digest = f"{digest_of(9):016x}"
    run.journal.delivery(
        DeliveryRecord(version=1, engine="engine-0", accepted=True, staged_digest=digest, live_digest=digest, time=1.0)
    )
    run.checkpoint(1)
    run.rollout(trace([(5, -1.0, 1)]))
    (problem,) = audit(run.close(), ConstantWeights).problems
    assert "step-00000001" in problem and f"{digest_of(1):016x}" in problem and f"{digest_of(9):016x}" in problem


def test_tokens_need_a_published_and_proved_version(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    run.version(1, accepted=False)
    run.version(2, live=7)
    run.version(3, live=0)  # A server that packs its weights cannot digest the live ones.
    for version in (1, 2, 3, 4):
        run.checkpoint(version)
        run.rollout(trace([(5, -1.0, version)]))
    found = audit(run.close(), ConstantWeights)
    assert found.problems == [
        "version 1 has sampled tokens but no engine has proved it",
        "engine-0 accepted version 2 with another digest than published",
        "version 4 has sampled tokens but was never published",
    ]
    assert [(entry.accepted, entry.rejected) for entry in found.versions] == [(0, 1), (1, 0), (1, 0), (0, 0)]


def test_a_damaged_record_and_a_row_that_does_not_fit_are_named(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    run.version(1)
    run.checkpoint(1)
    for _ in range(3):
        run.rollout(trace([(5, -1.0, 1)]))
    run_dir = run.close()
    with sqlite3.connect(run_dir / "journal.db") as db:
        (offset,) = db.execute("SELECT offset FROM rollouts WHERE id = '1/0'").fetchone()
        db.execute("UPDATE rollouts SET sampled_tokens = 2, checksum = NULL WHERE id = '2/0'")
    segment = run_dir / "segments" / "000001.seg"
    data = bytearray(segment.read_bytes())
    data[offset + 30] ^= 1
    segment.write_bytes(data)
    damaged, other = audit(run_dir, ConstantWeights).problems
    assert damaged.startswith("rollout 1/0: ") and "damaged" in damaged
    assert other == "rollout 2/0: its tokens are not those that its row in the journal counts"


def test_a_kept_cache_is_checked_up_to_the_first_swap(tmp_path: Path) -> None:
    """After a swap with kept keys and values no single version's forward pass gives what was recorded."""
    for interrupt, checked in (("never", 1), ("abort", 3)):
        run = RunMaker(tmp_path / interrupt, engine__kv="keep", engine__interrupt=interrupt)
        for version in (1, 2):
            run.version(version)
            run.checkpoint(version)
        run.rollout(trace([(5, -1.0, 1), (6, -1.0, 2), (7, -1.0, 2)]))
        found = audit(run.close(), ConstantWeights)
        assert found.compared == checked
        assert found.not_checkable == ({KEPT_CACHE: 2} if checked == 1 else {})


def test_untrained_context_with_records_is_checked_too(tmp_path: Path) -> None:
    run = RunMaker(tmp_path)
    run.version(1)
    run.version(2)
    run.checkpoint(1)
    run.checkpoint(2)
    salvaged = trace([(5, -1.0, 1), (6, -1.0, 2)])
    salvaged.trained = salvaged.trained & (salvaged.versions != 1)
    run.step(1, version=2)
    run.rollout(salvaged, step=1)
    one, two = audit(run.close(), ConstantWeights).versions
    assert (one.tokens, one.lag_max) == (1, None), "compared, though it never reached a loss"
    assert (two.tokens, two.lag_max) == (1, 0)


def test_the_model_directory_stands_for_versions_before_the_first_step(tmp_path: Path) -> None:
    def run_in(name: str, **settings: str) -> Path:
        run = RunMaker(tmp_path / name, model__weights="load", **settings)
        run.version(0)
        run.rollout(trace([(5, -1.0, 0)]))
        return run.close()

    assert audit(run_in("loaded"), ConstantWeights).versions[0].tokens == 1
    assert audit(run_in("warmed", warm_start__steps="5"), ConstantWeights).not_checkable == {NO_CHECKPOINT: 1}

    class Changed(ConstantWeights):
        digest = 5

    found = audit(run_in("changed"), Changed)
    assert found.not_checkable == {CHANGED_MODEL: 1} and found.problems == []

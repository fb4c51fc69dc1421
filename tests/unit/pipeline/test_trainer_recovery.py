"""A trainer that dies and a run that is resumed, on the controller's real loops, without a process."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from controller_parts import FakeRun

from headrace.buffer.reader import open_readonly
from headrace.buffer.window import Window
from headrace.channel.codec import encode
from headrace.channel.events import Returned
from headrace.config import make_config
from headrace.delivery.base import Manifest, Proof
from headrace.pipeline.batches import make_batch
from headrace.types import Batch, Group, Prompt, Rollout, Trace
from lengths import lognormal_lengths


def content(batch: Batch) -> tuple[bytes, ...]:
    """Everything of a batch that reaches a loss."""
    lags = batch.lags()
    arrays = (
        batch.token_ids,
        batch.lengths,
        batch.trained,
        batch.logprobs,
        batch.versions,
        batch.advantages,
        batch.weights,
        lags,
    )
    return tuple(np.ascontiguousarray(array).tobytes() for array in arrays)


def revive(run: FakeRun, checkpoint: int | None) -> None:
    """Have the trainer come back at this step a moment after each death."""

    def died() -> None:
        run.trainer_dies()
        asyncio.get_running_loop().call_later(0.03, run.trainer_returns, checkpoint)

    run.trainer.on_death = died


@pytest.mark.parametrize("publish_every", [1, 2])
@pytest.mark.parametrize("checkpoint", [None, 4])
async def test_a_trainer_that_dies_is_brought_back_from_the_journal(
    tmp_path: Path, publish_every: int, checkpoint: int | None
) -> None:
    run = FakeRun(
        tmp_path, "buffer.depth=2", "run.versions=10", f"delivery.publish_every={publish_every}", "warm_start.steps=2",
        "pipeline.record=true", engine={"lengths": lognormal_lengths(4, 1.0, seed=1)},
    )  # fmt: skip
    run.trainer.died_in = [5, 9]
    revive(run, checkpoint)
    await run.run()

    steps, total = [batch.step for batch in run.trainer.batches], 10 * publish_every
    back = -2 if checkpoint is None else checkpoint
    first, again = steps.index(4) + 1, list(range(back + 1, 5))
    assert steps[:first] == list(range(-1, 5)), "steps reach it in order"
    assert steps[first : first + len(again)] == again, "what the checkpoint lacks is trained again, in order"
    assert steps[-(total - 8) :] == list(range(9, total + 1))
    seen: dict[int, tuple[bytes, ...]] = {}
    for batch in run.trainer.batches:
        assert seen.setdefault(batch.step, content(batch)) == content(batch), f"step {batch.step} is another batch"

    rows = run.journal("SELECT id, step FROM versions ORDER BY id")
    assert [row["id"] for row in rows] == list(range(len(rows))), "no id is used twice, none is left out"
    assert len(rows) == 11 + 2, "each return published under an id of its own"
    published = [row["step"] for row in rows]
    assert all(later in (earlier, earlier + publish_every) for earlier, later in pairwise(published))
    assert run.controller.versions.proved == run.controller.last_version == 12
    ledger = run.recorder.ledgers.as_dict()["groups"]
    assert (ledger["admitted"], ledger["trained"]) == (2 * total, 2 * total), "nothing is generated again"
    restarts = run.journal("SELECT process, from_step, to_step FROM restarts WHERE process = 'trainer-0'")
    assert [(row["from_step"], row["to_step"]) for row in restarts] == [(back, 4), (back, 8)]
    lags = np.concatenate([batch.lags() for batch in run.trainer.batches if batch.objective == "policy"])
    assert 0 < lags.max() <= run.window.lag_bound and lags.min() >= 0


async def test_an_engine_that_comes_back_before_the_trainers_weights_waits_for_them(tmp_path: Path) -> None:
    """What the dead trainer published is gone with it: an engine without weights must not be asked to take that."""
    run = FakeRun(tmp_path, "run.versions=6", engines=2)
    pool, gone = run.controller.parts.pool, set[int]()
    run.trainer.died_in = [4]
    plain = run.engines[0].load
    asked: list[int] = []

    async def load(manifest: Manifest) -> Proof:
        asked.append(manifest.version)
        if manifest.version in gone:
            reason = "its segment cannot be opened"
            return Proof(engine="engine-0", version=manifest.version, accepted=False, reason=reason)
        return await plain(manifest)

    run.engines[0].load = load  # type: ignore[method-assign]

    async def come_back() -> None:
        pool.lose("engine-0", "killed by the test")
        await asyncio.sleep(0.03)
        gone.update(range(100))
        run.trainer_returns(None)
        run.events.put(Returned("engine-0"))
        before = len(asked)
        await asyncio.sleep(0.01)
        assert asked[before:] == []
        gone.clear()

    def died() -> None:
        run.trainer_dies()
        run.tasks = [asyncio.create_task(come_back())]  # type: ignore[attr-defined]

    run.trainer.on_death = died
    await run.run()
    await run.tasks[0]  # type: ignore[attr-defined]
    assert run.trainer.resent == []
    assert run.controller.versions.proved == run.controller.last_version
    assert pool.proved("engine-0") == run.controller.last_version


async def test_a_trainer_that_dies_while_it_comes_back_comes_back_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "run.versions=6")
    run.trainer.died_in = [4, 2]  # In step 4, and then in step 2 of its return.
    run.trainer.on_batch = lambda: None
    revive(run, None)
    first = run.trainer.died_in.pop()
    plain = run.trainer.on_death

    def died() -> None:
        if run.trainer.batches and run.trainer.batches[-1].step >= 3:
            run.trainer.died_in.append(first)
        plain()

    run.trainer.on_death = died
    await run.run()
    assert [batch.step for batch in run.trainer.batches] == [1, 2, 3, 1, 1, 2, 3, 4, 5, 6]
    assert run.recorder.ledgers.as_dict()["groups"]["trained"] == 12


def crash(run: FakeRun, to: Path) -> None:
    """What a kill -9 at this moment would leave on the disk."""
    to.mkdir()
    with sqlite3.connect(run.path / "journal.db") as source, sqlite3.connect(to / "journal.db") as target:
        source.backup(target)
    shutil.copytree(run.path / "segments", to / "segments")


def crash_at_every_batch(run: FakeRun, directory: Path) -> list[Path]:
    """What a run that dies when a batch reaches the trainer leaves, for each batch."""
    crashed: list[Path] = []

    def on_batch() -> None:
        run.recorder.journal.flush()
        crash(run, directory / f"after{len(crashed)}")
        crashed.append(directory / f"after{len(crashed)}")

    run.trainer.on_batch = on_batch
    return crashed


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("publish_every", [1, 2])
async def test_a_run_killed_at_any_step_is_resumed_with_everything(
    tmp_path: Path, depth: int, publish_every: int
) -> None:
    settings = [f"buffer.depth={depth}", "run.versions=6", f"delivery.publish_every={publish_every}"]
    engine = {"lengths": lognormal_lengths(4, 1.0, seed=2), "token_seconds": 0.002}
    (tmp_path / "first").mkdir()
    run = FakeRun(tmp_path / "first", *settings, engine=engine, train_seconds=0.02)
    crashed = crash_at_every_batch(run, tmp_path)
    await run.run()
    original = {batch.step: batch for batch in run.trainer.batches}
    for number, path in enumerate(crashed[1::2]):
        again = FakeRun(path, *settings, engine=engine, checkpoint_step=0)
        before = {row["id"] for row in again.journal("SELECT id FROM groups")}
        ready = {
            left.group.id: [encode(rollout) for rollout in left.group.rollouts]
            for left in again.unfinished
            if left.complete
        }
        await again.run()
        steps = [batch.step for batch in again.trainer.batches]
        assert steps == list(range(1, 6 * publish_every + 1)), f"crash {number}"
        replayed = again.controller.parts.first_step
        for batch in again.trainer.batches[:replayed]:
            assert content(batch) == content(original[batch.step])
        ledger = again.recorder.ledgers.as_dict()["groups"]
        assert ledger["trained"] == ledger["admitted"] == 12 * publish_every, "every group that was begun is trained"
        trained = {row["id"] for row in again.journal("SELECT id FROM groups WHERE state = 'trained'")}
        assert before <= trained
        kept = {row["id"] for row in again.journal("SELECT id FROM groups WHERE state = 'trained'")} & ready.keys()
        assert kept == ready.keys(), "what was complete is not generated again"
        versions = [row["id"] for row in again.journal("SELECT id FROM versions ORDER BY id")]
        assert versions == list(range(len(versions)))
        (resumed,) = again.journal("SELECT from_step, to_step FROM restarts WHERE reason = 'resumed'")
        assert (resumed["from_step"], resumed["to_step"]) == (0, replayed)


OPTIONS = {
    "filters": ("buffer.depth=2", 'buffer.filter=["zero_variance"]', "buffer.oversample=2"),
    "overlong": ("buffer.depth=1", 'buffer.filter=["overlong"]', "rollouts.group_size=4"),
    "salvage": ("buffer.depth=unbounded", "buffer.max_lag=1", "buffer.on_stale=salvage", "rollouts.max_tokens=40"),
    "drop": ("buffer.depth=1", "buffer.max_lag=1", "buffer.on_stale=drop", "rollouts.max_tokens=40"),
    "stragglers": ("rollouts.group_size=4", "rollouts.min_group=3", "rollouts.straggler_seconds=0.01"),
    "curriculum": ("rollouts.curriculum=true", "buffer.depth=1"),
}


def check_end(run: FakeRun) -> None:
    """What every run with six versions of two groups must leave behind, whatever happened to it."""
    with open_readonly(run.path / "journal.db") as journal:
        assert journal.imbalances() == []
    ledger = run.recorder.ledgers.as_dict()["groups"]
    assert ledger["trained"] == 12
    assert ledger["admitted"] == ledger["trained"] + ledger["dropped"] + ledger["failed"]
    versions = [row["id"] for row in run.journal("SELECT id FROM versions ORDER BY id")]
    assert versions == list(range(len(versions)))
    lags = np.concatenate([batch.lags() for batch in run.trainer.batches])
    assert lags.min() >= 0 and lags.max() <= run.window.lag_bound


@pytest.mark.parametrize("options", OPTIONS)
async def test_options_of_the_buffer_survive_deaths(tmp_path: Path, options: str) -> None:
    settings = [*OPTIONS[options], "run.versions=6"]
    engine = {"lengths": lognormal_lengths(5, 1.2, seed=3), "token_seconds": 0.002}
    (tmp_path / "first").mkdir()
    run = FakeRun(tmp_path / "first", *settings, engine=engine, train_seconds=0.01)
    run.trainer.died_in = [4]
    revive(run, None)
    crashed = crash_at_every_batch(run, tmp_path)
    await run.run()
    check_end(run)
    original = {batch.step: content(batch) for batch in run.trainer.batches}
    for batch in run.trainer.batches:
        assert content(batch) == original[batch.step], "what is trained again is the same"
    for path in crashed[1::3]:
        again = FakeRun(path, *settings, engine=engine, checkpoint_step=0)
        await again.run()
        check_end(again)
        assert [batch.step for batch in again.trainer.batches] == list(range(1, 7))
        for batch in again.trainer.batches[: again.controller.parts.first_step]:
            assert content(batch) == original[batch.step]


@pytest.mark.parametrize(
    "later",
    [
        ["buffer.depth=1"],
        ["buffer.depth=0"],
        ["buffer.depth=1", "buffer.max_lag=1"],
        ["buffer.depth=2", "buffer.max_lag=2"],
        ["buffer.depth=1", "buffer.max_lag=2", "buffer.on_stale=salvage"],
        ["buffer.depth=1", "buffer.max_lag=8", "buffer.on_stale=drop"],
    ],
    ids=" ".join,
)
async def test_friction_53_a_resume_with_a_smaller_bound_drops_what_is_too_old_and_goes_on(
    tmp_path: Path, later: list[str]
) -> None:
    """The first ten groups begin under version 0, so some of them are four versions old when they are trained."""
    settings = ["buffer.depth=4", "run.versions=6", "rollouts.max_tokens=40"]
    slow = {"lengths": lambda request: 40 if int(request.group) % 5 == 0 else 2, "token_seconds": 0.002}
    (tmp_path / "first").mkdir()
    run = FakeRun(tmp_path / "first", *settings, engine=slow, train_seconds=0.005)
    crashed = crash_at_every_batch(run, tmp_path)
    await run.run()
    dropped: set[str] = set()
    again_drawn = 0
    for path in crashed[2:5]:
        again = FakeRun(path, *settings, *later, engine=slow, checkpoint_step=0)
        await again.run()
        ledger = again.recorder.ledgers.as_dict()["groups"]
        assert ledger["trained"] == 12 and ledger["failed"] == 0
        done = again.controller.parts.first_step
        lags = np.concatenate([np.zeros(1, int), *[batch.lags() for batch in again.trainer.batches[done:]]])
        assert lags.max() <= again.window.lag_bound
        dropped |= ledger["reasons"]["dropped"].keys()
        ended = again.journal("SELECT prompt, reason FROM groups WHERE state = 'dropped' AND reason LIKE '%resume'")
        trained = {row["prompt"] for row in again.journal("SELECT prompt FROM groups WHERE state = 'trained'")}
        again_drawn += len({row["prompt"] for row in ended} & trained)
    assert dropped <= {"too old after a resume", "no slot after a resume", "stale", "run over"} and dropped
    if "on_stale" not in str(later):
        assert again_drawn, "a prompt whose group was given up is tried again"


def test_a_batch_from_the_journal_is_masked_as_the_window_masked_it() -> None:
    settings = ["buffer.on_stale=salvage", "buffer.max_lag=1", "buffer.depth=unbounded", "buffer.groups=1"]
    config = make_config({"model": {"path": "-"}, "task": {"kind": "gym", "name": "-"}}, settings)
    window = Window(1, "unbounded", max_lag=1, on_stale="salvage", oversample=2.0)

    def group(group_id: int, *versions: int) -> Group:
        trace = Trace.of_context(np.arange(2, dtype=np.int32)).extended(
            np.arange(len(versions)), np.full(len(versions), -0.5), np.array(versions), trained=True
        )
        rollouts = [
            Rollout(id=f"{group_id}/{i}", index=i, traces=[trace], ending="finished", reward=float(i)) for i in range(2)
        ]
        return Group(id=group_id, prompt=Prompt(id="p", text="x"), version=min(versions), rollouts=rollouts)

    window.admit(0, 0)
    window.admit(1, 0)
    window.complete(group(1, 0))
    assert window.take() is not None
    assert window.republish(1) == 2, "1 comes back as 2"
    window.release(2)
    window.admit(2, 2)
    window.complete(group(2, 2))
    assert window.take() is not None and window.trained_version == 3
    window.release(3)
    late = group(0, 0, 1, 2, 3)
    window.complete(late)
    assert window.stale() == []
    taken = window.take()
    assert taken is not None
    masked = make_batch(config, taken, step=3, version=3, republished=window.republished)
    again = make_batch(config, [late], step=3, version=3, republished=window.republished)
    assert content(masked) == content(again)
    for batch in (masked, again):
        assert batch.trained.tolist() == [False, False, False, True, True, True] * 2, "1 and 2 are the same weights"


async def test_the_schedule_is_recorded_in_its_order(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "buffer.depth=1", "run.versions=4", "pipeline.record=true")
    await run.run()
    events = run.journal("SELECT event, group_id, step, version, engine FROM schedule ORDER BY id")
    places: dict[int, list[str]] = {}
    for event in events:
        if event["group_id"] is not None:
            places.setdefault(event["group_id"], []).append(event["event"])
    assert len(places) == 8 and set(map(tuple, places.values())) == {("admit", "complete", "consume")}
    assert [event["version"] for event in events if event["event"] == "swap"] == list(range(5))
    consumed = [(event["step"], event["group_id"]) for event in events if event["event"] == "consume"]
    rows = run.journal("SELECT step, id FROM groups ORDER BY step, id")
    assert consumed == [(row["step"], row["id"]) for row in rows]

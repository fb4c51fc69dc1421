"""Tokens are trained at the temperature at which they were sampled, also after a resume with another temperature."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest
from controller_parts import FakeRun

from headrace.buffer.journal import Journal
from headrace.config import make_config
from headrace.engines.fake_policy import FakePolicy
from headrace.pipeline.batches import make_batch, recorded_batches
from headrace.types import Batch, Group, Prompt, Rollout, Trace
from lengths import lognormal_lengths

POLICY = FakePolicy(64)
SCRIPTED = (63, 0)
"""The tokens that the fake engine puts at the planned end of an answer, and in place of an earlier end."""


def behaviour(batch: Batch, temperatures: np.ndarray) -> np.ndarray:
    """Return the log-probability of every trained token under its own version, at these temperatures."""
    starts = np.repeat(np.cumsum(batch.lengths) - batch.lengths, batch.lengths)
    found = np.zeros(len(batch.token_ids))
    for place in np.flatnonzero(batch.trained):
        position, version = int(place - starts[place]), int(batch.versions[place])
        every = np.array([POLICY.logprob(token, position, version) for token in range(64)]) / temperatures[place]
        found[place] = every[batch.token_ids[place]] - np.log(np.exp(every).sum())
    return found


def temperatures_of(batch: Batch) -> np.ndarray:
    every = np.arange(len(batch.token_ids))
    return np.broadcast_to(batch.temperature_at(every), len(every))


def crash(run: FakeRun, to: Path) -> None:
    """What a kill -9 at this moment would leave on the disk."""
    run.controller.attempts.save()
    run.recorder.journal.flush()
    to.mkdir()
    with sqlite3.connect(run.path / "journal.db") as source, sqlite3.connect(to / "journal.db") as target:
        source.backup(target)
    shutil.copytree(run.path / "segments", to / "segments")


async def test_friction_54_tokens_are_trained_at_the_temperature_at_which_they_were_sampled(tmp_path: Path) -> None:
    settings = ["buffer.depth=2", "run.versions=8", "rollouts.max_tokens=24"]
    engine = {"lengths": lognormal_lengths(8, 0.8, seed=2), "token_seconds": 0.002}
    (tmp_path / "first").mkdir()
    first = FakeRun(tmp_path / "first", *settings, engine=engine, train_seconds=0.01)

    def on_batch() -> None:
        if len(first.trainer.batches) == 3:
            crash(first, tmp_path / "crashed")
            first.controller.stop()

    first.trainer.on_batch = on_batch
    await first.run()

    again = FakeRun(
        tmp_path / "crashed",
        *settings,
        "rollouts.temperature=0.5",
        engine=engine,
        checkpoint_step=0,
        train_seconds=0.01,
    )
    await again.run()
    used = set()
    for batch in again.trainer.batches:
        temperatures = temperatures_of(batch)
        checked = batch.trained & ~np.isin(batch.token_ids, SCRIPTED)
        np.testing.assert_allclose(behaviour(batch, temperatures)[checked], batch.logprobs[checked], atol=1e-5)
        used.add(tuple(np.unique(temperatures[batch.trained]).tolist()))
    assert (1.0,) in used and (0.5,) in used, "steps before the crash are trained again, and new ones"
    assert (0.5, 1.0) in used, "a batch may have tokens of both"
    recorded = list(recorded_batches(again.config, again.path / "journal.db", 0, 8))
    assert [temperatures_of(batch)[batch.trained].tolist() for batch in recorded] == [
        temperatures_of(batch)[batch.trained].tolist() for batch in again.trainer.batches
    ]


def group_of(*traces: Trace) -> Group:
    rollouts = [
        Rollout(id=f"0/{i}", index=i, traces=[trace], ending="finished", reward=float(i))
        for i, trace in enumerate(traces)
    ]
    return Group(id=0, prompt=Prompt(id="p", text="x"), version=0, rollouts=rollouts)


def sampled(n: int, temperature: float | None) -> Trace:
    more = Trace.of_context(np.arange(2, dtype=np.int32)).extended(
        np.arange(n), np.full(n, -0.5), np.zeros(n, int), trained=True
    )
    return more if temperature is None else msgspec.structs.replace(more, temperatures=[(2, 0.0), (n, temperature)])


def test_friction_54_tokens_of_an_older_release_have_the_temperature_of_their_run(tmp_path: Path) -> None:
    config = make_config({"model": {"path": "-"}, "task": {"kind": "gym", "name": "-"}}, ["rollouts.temperature=0.5"])
    old = [sampled(3, None), sampled(2, None)]
    assert make_batch(config, [group_of(*old)], step=1, version=0).temperature == 0.5
    batch = make_batch(config, [group_of(*old)], step=1, version=0, unrecorded=0.8)
    assert (batch.temperature, batch.temperatures) == (0.8, None)
    batch = make_batch(config, [group_of(sampled(3, None), sampled(2, 0.5))], step=1, version=0, unrecorded=0.8)
    assert temperatures_of(batch)[batch.trained].tolist() == pytest.approx([0.8] * 3 + [0.5] * 2)
    for first in (0.8, 0.5):  # The first fact stays, whatever a later resume says.
        with Journal(tmp_path / "journal.db") as journal:
            journal.meta("temperature", first, once=True)
            assert journal.recover(step=0).temperature == 0.8


def test_friction_54_temperatures_are_cut_and_joined_with_their_tokens() -> None:
    trace = Trace.joined([sampled(3, 0.5), sampled(2, None), sampled(4, 1.0), sampled(1, 1.0)])
    every = [7.0, 7.0, 0.5, 0.5, 0.5, *[7.0] * 6, *[1.0] * 4, 7.0, 7.0, 1.0]
    assert trace.temperature_of_tokens(7.0).tolist() == every
    for start in range(len(trace) + 1):
        for end in range(start, len(trace) + 1):
            part = trace.part(start, end)
            assert part.temperature_of_tokens(7.0).tolist() == every[start:end]
            whole = Trace.joined([trace.part(0, start), part, trace.part(end, len(trace))])
            assert whole.temperature_of_tokens(7.0).tolist() == every
    assert Trace.joined([sampled(3, None), sampled(1, None)]).temperatures == []

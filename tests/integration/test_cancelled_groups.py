"""Groups that can no longer make the bound, in real runs: cancelled early, every token what its version says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from runs import recompute

from headrace import Run
from headrace.bench.workload import LengthsEpisode, LengthsTask, write_model
from headrace.config import make_config
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.review.summary import read_ledgers
from headrace.types import NO_VERSION, Prompt, Rollout

SHORT, LONG, EVERY = 6, 150, 5


class LongPrompts(LengthsTask):
    """To every fifth prompt the answers are long; which ones they are does not change from attempt to attempt."""

    def __init__(self, seed: int, heldout: int) -> None:
        super().__init__(8, "equal:1", seed, heldout)

    def episode(self, prompt: Prompt) -> LengthsEpisode:
        return LengthsEpisode(prompt, LONG if int(prompt.id) % EVERY == 0 else SHORT, float(self._draw.random() < 0.5))


def run_with(directory: Path, on_stale: str) -> Path:
    write_model(directory / "model")
    config = make_config(
        {
            "run": {"name": "run", "directory": str(directory), "versions": 14},
            "model": {"path": str(directory / "model"), "weights": "random"},
            "task": {"kind": "environment", "factory": f"{__name__}:LongPrompts"},
            "engine": {"slots": 32, "max_length": 8 + LONG + 16, "device": "cpu"},
            "rollouts": {"group_size": 2, "max_tokens": LONG},
            "buffer": {"groups": 4, "depth": "unbounded", "max_lag": 2, "on_stale": on_stale},
            "training": {"learning_rate": 1e-3, "checkpoint_every": 1, "keep_checkpoints": 40, "device": "cpu"},
            "observe": {"display": "none"},
        }
    )
    return start_run(config, NoProgress()).run_dir.path


def sampled(rollout: Rollout) -> int:
    return int((rollout.traces[0].versions != NO_VERSION).sum())


@pytest.mark.slow
@pytest.mark.parametrize("on_stale", ["drop", "salvage"])
def test_a_group_that_comes_too_late_is_cancelled(tmp_path: Path, on_stale: str) -> None:
    run_dir = run_with(tmp_path, on_stale)
    found = read_ledgers(run_dir)
    assert found["balanced"] and set(found["groups"]["reasons"]["dropped"]) <= {"stale", "surplus"}
    cut = list(Run(run_dir).rollouts("state = 'dropped' AND reason = 'stale' AND ending = 'aborted'"))
    assert any(0 < sampled(rollout) < LONG for rollout in cut), "cancelled in the middle, not after the end"
    compared, mixed = recompute(run_dir, "state = 'dropped' AND reason = 'stale'")
    assert compared > 50 and mixed > 0
    compared, _ = recompute(run_dir, "state = 'trained'")
    assert compared > 200
    assert Run(run_dir).summary["lag_max"] <= 2
    heirs = [rollout for rollout in Run(run_dir).rollouts() if _inherits(rollout)]
    assert bool(heirs) == (on_stale == "salvage")
    for heir in heirs:
        _check_heir(heir, cut)


def _inherits(rollout: Rollout) -> bool:
    trace = rollout.traces[0]
    return bool((~trace.trained & (trace.versions != NO_VERSION)).any())


def _check_heir(heir: Rollout, cut: list[Rollout]) -> None:
    """Its untrained beginning is an earlier attempt's, record for record."""
    trace = heir.traces[0]
    end = int(np.flatnonzero(~trace.trained & (trace.versions != NO_VERSION))[-1]) + 1
    parents = [one.traces[0] for one in cut if len(one.traces[0]) == end]
    assert any(
        np.array_equal(parent.token_ids, trace.token_ids[:end])
        and np.array_equal(parent.logprobs, trace.logprobs[:end])
        and np.array_equal(parent.versions, trace.versions[:end])
        for parent in parents
    ), heir.id
    assert trace.trained[end:].all()

"""A mixture of experts in real runs: engines record experts, the journal keeps them, the trainer goes through them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from runs import ROOT, headrace, small_config

from headrace import Run
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.types import NO_EXPERT

LAYERS, EXPERTS, CHOSEN = 3, 8, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(ROOT / "examples/quickstart/model", path)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def trained(directory: Path, model: Path, *more: str) -> Run:
    config = small_config(
        directory,
        f"model.path={model}",
        "buffer.depth=0",
        "run.versions=1",
        "delivery.publish_every=2",
        "warm_start.steps=40",
        "training.learning_rate=1e-3",
        "training.warmup_steps=0",
        "pipeline.record=true",
        "evaluate.prompts=0",
        *more,
    )
    return Run(start_run(config, NoProgress()).run_dir.path)


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return trained(tmp_path_factory.mktemp("recorded"), model)


def test_every_sampled_token_has_its_experts_and_no_other(run: Run) -> None:
    traces = [trace for rollout in run.rollouts() for trace in rollout.traces]
    assert traces
    for trace in traces:
        assert trace.routing.shape == (len(trace), LAYERS, CHOSEN)
        assert (trace.routing[~trace.trained] == NO_EXPERT).all()
        assert ((trace.routing >= 0) & (trace.routing < EXPERTS))[trace.trained].all()
    assert len(np.unique(np.concatenate([trace.routing[trace.trained] for trace in traces]))) == EXPERTS


def test_the_record_keeps_the_trainer_near_to_what_was_sampled(run: Run, model: Path, tmp_path: Path) -> None:
    """Two steps make a version: in the second, some routers would choose other experts than those that sampled."""
    free = trained(tmp_path, model, "rollouts.keep_routing=false")
    assert all(trace.routing is None for rollout in free.rollouts() for trace in rollout.traces)
    (first, second), (first_free, second_free) = run.history, free.history
    # The same tokens under the same weights, routed as they were sampled: the record changes nothing.
    assert first["rerouted"] == 0
    assert first["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert first["loss"] == first_free["loss"]
    assert first["grad_norm"] == first_free["grad_norm"]
    # The same tokens again; but the weights have moved since they were sampled.
    assert second["reward"] == second_free["reward"]
    assert 0 < second["rerouted"] < 0.5
    assert second["kl_k3"] < second_free["kl_k3"]
    assert "rerouted" not in second_free


def test_a_run_is_trained_again_through_the_same_experts(run: Run) -> None:
    again = headrace("replay", str(run.path), "--json")
    assert again.returncode == 0, again.stdout + again.stderr
    found = json.loads(again.stdout)
    assert (found["identical"], found["steps"]) == (True, 2)

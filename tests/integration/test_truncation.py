"""Truncated sampling and every policy beside the one in training, in real runs: what was recorded counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from runs import small_config

from headrace import Run
from headrace.models.loading import load_model
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.review.audit import audit
from headrace.review.recompute import PlainModel

TRUNCATED = ("rollouts.top_p=0.7", "rollouts.min_p=0.01", "rollouts.temperature=0.9")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(
        tmp_path_factory.mktemp("truncated"),
        "buffer.depth=0",
        "run.versions=2",
        "training.checkpoint_every=1",
        "evaluate.prompts=0",
        *TRUNCATED,
    )
    return start_run(config, NoProgress()).run_dir.path


def test_the_trainer_finds_what_the_engine_recorded(run_dir: Path) -> None:
    """On-policy every ratio is 1, with the normaliser over what was kept; over all tokens it would be below."""
    steps = Run(run_dir).history
    assert len(steps) == 2
    for step in steps:
        assert step["ratio"] == pytest.approx(1.0, abs=1e-4)
        assert 0 <= step["kl_k3"] < 1e-8


def test_recorded_log_probabilities_are_those_among_the_kept_tokens(run_dir: Path) -> None:
    rollouts = list(Run(run_dir).rollouts())
    sizes = np.concatenate([trace.kept.counts[trace.trained] for rollout in rollouts for trace in rollout.traces])
    assert sizes.min() >= 1
    assert len(np.unique(sizes)) > 3
    found = audit(run_dir, PlainModel, tolerance=1e-4)
    assert found.problems == []
    assert found.compared > 50
    # And among all tokens they are others.
    latest = max((run_dir / "checkpoints").iterdir())
    trace = rollouts[-1].traces[0]
    model = PlainModel(latest, "float32")
    whole, among = (model.logprobs(trace.token_ids, 0.9, kept) for kept in (None, trace.kept))
    assert float(np.abs(whole - among)[trace.trained[1:]].max()) > 0.05


def test_a_run_with_a_teacher_and_a_reference(tmp_path: Path) -> None:
    base = small_config(tmp_path)
    teacher = load_model(base.model.path, weights="random", seed=9)
    teacher.save_pretrained(tmp_path / "teacher")
    config = small_config(
        tmp_path,
        "run.versions=2",
        "evaluate.prompts=0",
        "algorithm.loss=distillation",
        f"algorithm.teacher={tmp_path / 'teacher'}",
        "algorithm.kl=k3",
        "algorithm.entropy_weight=0.01",
        "training.optimizer=muon",
        "training.learning_rates={embed = 0.5}",
        "rollouts.top_k=20",
    )
    run = Run(start_run(config, NoProgress()).run_dir.path)
    first, second = run.history
    assert first["teacher_kl"] > 0.01
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["reference_kl"] > 0
    assert 0 < second["entropy"] < np.log(20)
    assert second["update_ratio"] > 0

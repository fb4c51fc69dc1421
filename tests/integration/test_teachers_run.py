"""Runs with a teacher in a process of its own: what is recorded is what a plain forward pass of the teacher gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import headrace, small_config
from transformers import AutoModelForCausalLM

from headrace import Run
from headrace.models.loading import load_model
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.types import Trace

K = 4
TEMPERATURE = 0.9
COMMON = (
    "buffer.depth=0",
    "run.versions=2",
    "evaluate.prompts=4",
    "training.checkpoint_every=1",
    f"rollouts.temperature={TEMPERATURE}",
    "algorithm.loss=distillation",
    "algorithm.teacher_divergence=reverse",
    f"algorithm.teacher_top_k={K}",
)


def make_teacher(path: Path) -> Path:
    """Another random model with the policy's tokenizer."""
    own = Path(small_config(path).model.path)
    load_model(own, weights="random", seed=9).save_pretrained(path / "teacher")
    shutil.copy(own / "tokenizer.json", path / "teacher")
    return path / "teacher"


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with a served teacher, and the teacher's directory."""
    path = tmp_path_factory.mktemp("taught")
    teacher = make_teacher(path)
    config = small_config(path, *COMMON, "scorers.big.kind=teacher", f"scorers.big.model={teacher}")
    return start_run(config, NoProgress()).run_dir.path, teacher


def check_scores(trace: Trace, plain: torch.nn.Module) -> None:
    scores, places = trace.teacher, np.flatnonzero(trace.trained)
    assert scores is not None
    with torch.inference_mode():
        logits = plain(input_ids=torch.from_numpy(trace.token_ids.astype(np.int64))[None]).logits[0]
    for at in places:
        expected = torch.log_softmax(logits[at - 1].double() / TEMPERATURE, dim=-1)
        best = expected.topk(K)
        order = best.indices.argsort()
        assert scores.versions[at] == 0
        assert scores.logprobs[at] == pytest.approx(float(expected[int(trace.token_ids[at])]), abs=1e-4)
        assert scores.top_ids[at].tolist() == best.indices[order].tolist()
        np.testing.assert_allclose(scores.top_logprobs[at], best.values[order].numpy(), atol=1e-4)
        assert scores.tails[at] == pytest.approx(float(torch.log(-torch.expm1(best.values.logsumexp(0)))), abs=1e-3)
    assert (scores.versions[~trace.trained][: places[0]][:1] == -1).all()


def test_recorded_scores_are_those_of_a_plain_forward_pass(taught: tuple[Path, Path]) -> None:
    run_dir, teacher = taught
    plain = AutoModelForCausalLM.from_pretrained(teacher, attn_implementation="eager").eval()
    rollouts = list(Run(run_dir).rollouts())
    assert len(rollouts) == 32
    for rollout in rollouts:
        check_scores(rollout.traces[0], plain)
        [score] = [score for score in rollout.scores if score.scorer == "big"]
        assert score.version.endswith(":0")
        gap = (rollout.traces[0].teacher.logprobs - rollout.traces[0].logprobs)[rollout.traces[0].trained]
        assert score.value == pytest.approx(float(gap.mean()), abs=1e-5)
        # The task's own reward stays what it was.
        assert rollout.reward == next(score.value for score in rollout.scores if score.scorer != "big")


def test_a_served_teacher_teaches_what_one_inside_the_trainer_teaches(
    taught: tuple[Path, Path], tmp_path: Path
) -> None:
    run_dir, teacher = taught
    held = ["scorers.big.kind=teacher", f"scorers.big.model={teacher}", "scorers.big.in_trainer=true"]
    config = small_config(tmp_path, *COMMON, *held)
    inside = Run(start_run(config, NoProgress()).run_dir.path).history
    outside = Run(run_dir).history
    assert outside[0]["teacher_kl"] > 0.01
    for mine, other in zip(outside, inside, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-4)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
        assert mine["teacher_kl"] == pytest.approx(other["teacher_kl"], abs=1e-4)


def test_a_resumed_run_trains_from_recorded_scores(taught: tuple[Path, Path], tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(taught[0], tmp_path / "copy"))
    # Without its newest checkpoint, the run trains its last step again, from the journal.
    shutil.rmtree(max((run_dir / "checkpoints").glob("step-*")))
    before = Run(run_dir).history
    done = headrace("resume", str(run_dir), "--set", "run.versions=3")
    assert done.returncode == 0, done.stderr
    after = Run(run_dir).history
    assert len(after) == 3
    assert after[1]["teacher_kl"] == before[1]["teacher_kl"]
    other = headrace("resume", str(run_dir), "--set", "run.versions=4", "--set", "scorers.big.weight=2.0")
    assert other.returncode == 2
    assert "[scorers.big] weight: a teacher has no part in a reward" in other.stderr

"""A policy that learns from an average of itself: the teacher is delivered, proved and refreshed like an engine."""

from __future__ import annotations

import json
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

VERSIONS = 36
DECAY = 0.8

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config(
        tmp_path_factory.mktemp("moving"),
        f"run.versions={VERSIONS}",
        "warm_start.steps=0",
        "evaluate.prompts=0",
        "training.checkpoint_every=1",
        f"training.keep_checkpoints={VERSIONS + 1}",
        "algorithm.teacher_weight=0.5",
        "algorithm.teacher_divergence=forward",
        "algorithm.teacher_top_k=4",
        "scorers.self.kind=teacher",
        "scorers.self.policy=ema",
        f"scorers.self.decay={DECAY}",
    )
    return start_run(config, NoProgress()).run_dir.path


def refreshes(run_dir: Path) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "teacher"]


def averages(run_dir: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The average after every step, from the checkpoints alone."""
    config = small_config(run_dir.parent)
    first = load_model(config.model.path, weights=config.model.weights, seed=config.run.seed)
    average = {name: tensor.double() for name, tensor in first.named_parameters()}
    found = {0: average}
    for step, path in enumerate(sorted((run_dir / "checkpoints").glob("step-*")), 1):
        policy = dict(load_model(path).named_parameters())
        average = {name: DECAY * average[name] + (1 - DECAY) * policy[name].double() for name in average}
        found[step] = average
    return found


def test_the_teacher_is_refreshed_by_itself_and_proved_each_time(run_dir: Path) -> None:
    found = refreshes(run_dir)
    assert len(found) >= 20
    assert all(record["accepted"] and record["live_digest"] == record["digest"] for record in found)
    assert len({record["digest"] for record in found}) == len(found)
    versions = [record["version"] for record in found]
    assert versions == sorted(set(versions))


@torch.no_grad()
def test_scores_are_those_of_the_average_at_the_version_that_they_name(run_dir: Path) -> None:
    steps = {record["version"]: record["step"] for record in refreshes(run_dir)}
    known = averages(run_dir)
    newest = max((run_dir / "checkpoints").glob("step-*"))
    model = AutoModelForCausalLM.from_pretrained(newest, attn_implementation="eager").eval()
    used = set()
    rollouts = list(Run(run_dir).rollouts())
    for rollout in rollouts[:: len(rollouts) // 40]:
        [trace] = rollout.traces
        [version] = set(trace.teacher.versions[trace.trained].tolist())
        used.add(version)
        for name, tensor in model.named_parameters():
            tensor.copy_(known[steps[version]][name])
        plain = model(input_ids=torch.from_numpy(trace.token_ids.astype(np.int64))[None]).logits[0]
        expected = plain.log_softmax(-1)[:-1].gather(1, torch.from_numpy(trace.token_ids[1:].astype(np.int64))[:, None])
        np.testing.assert_allclose(
            trace.teacher.logprobs[trace.trained], expected[:, 0].numpy()[trace.trained[1:]], atol=1e-3
        )
    assert len(used) > 5
    # The teacher is not the policy: their log-probabilities differ.
    assert any(step["teacher_kl"] > 1e-5 for step in Run(run_dir).history)


def test_a_resumed_run_continues_its_teacher(run_dir: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_dir, tmp_path / "copy"))
    done = headrace("resume", str(copy), "--set", f"run.versions={VERSIONS + 2}")
    assert done.returncode == 0, done.stderr
    later = [record for record in refreshes(copy) if record["version"] > refreshes(run_dir)[-1]["version"]]
    assert later
    assert all(record["accepted"] for record in later)
    assert later[0]["step"] == VERSIONS

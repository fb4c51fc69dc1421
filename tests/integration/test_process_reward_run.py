"""Runs with a process-reward model in a process of its own: its scores, its death, and the rollouts that it ends."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForTokenClassification

sys.path += [str(Path(__file__).parents[2] / "examples" / "steps")]

from make import write_tokenizer
from make_reward_model import MARKER, make_model
from runs import ROOT, headrace, start, worker_pids

from headrace import Run
from headrace.review.summary import read_ledgers

EXAMPLE = ROOT / "examples/steps"
SMALL = {
    "run.name": "run",
    "run.versions": 3,
    "warm_start.steps": 2,
    "warm_start.batch": 8,
    "rollouts.group_size": 4,
    "rollouts.max_tokens": 48,
    "buffer.groups": 2,
    "engine.slots": 8,
    "evaluate.prompts": 2,
    "observe.display": "none",
}


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """A reward model with random weights, whose verdicts differ widely."""
    torch.manual_seed(3)
    model = make_model("classifier")
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(tmp_path / "reward_model")
    write_tokenizer(tmp_path / "reward_model")
    return tmp_path / "reward_model"


def arguments(directory: Path, **more: object) -> list[str]:
    settings = {**SMALL, "run.directory": directory, "scorers.steps.model": directory / "reward_model", **more}
    given = [f"{key}={value}" for key, value in settings.items()]
    return ["train", str(EXAMPLE / "steps.toml"), *(part for setting in given for part in ("--set", setting))]


def test_every_step_has_the_score_of_a_plain_pass(tmp_path: Path, reward_model: Path) -> None:
    done = headrace(*arguments(tmp_path))
    assert done.returncode == 0, done.stderr
    assert read_ledgers(tmp_path / "run")["balanced"]
    reference = AutoModelForTokenClassification.from_pretrained(reward_model).eval()
    steps = 0
    for rollout in Run(tmp_path / "run").rollouts():
        [trace] = rollout.traces
        tokens = torch.from_numpy(trace.token_ids).long()
        with torch.no_grad():
            chances = reference(input_ids=tokens[None]).logits[0].softmax(-1)[:, 1]
        scores = [score for score in rollout.scores if score.scorer == "steps"]
        ends = [at + 1 for at in range(len(tokens)) if tokens[at] == MARKER and trace.versions[at] >= 0]
        assert [score.end for score in scores] == ends
        assert [score.value for score in scores] == pytest.approx([float(chances[end - 1]) for end in ends], abs=1e-5)
        for score in scores:
            assert score.level == "step"
            assert len(score.version) == 16
            assert score.metrics["began"] <= score.metrics["ended"] <= score.metrics["arrived"]
        steps += len(scores)
    assert steps > 30


@pytest.mark.slow
def test_answers_with_low_scores_end_early(tmp_path: Path, reward_model: Path) -> None:
    # Nearly every step scores less than this. Answers that have no step, or end soon after it, are trained.
    done = headrace(*arguments(tmp_path, **{"scorers.steps.cancel_below": 0.9, "rollouts.max_tokens": 90}))
    assert done.returncode == 0, done.stderr
    assert read_ledgers(tmp_path / "run")["balanced"]
    ended = list(Run(tmp_path / "run").rollouts("ending = 'aborted'"))
    assert ended
    for rollout in ended:
        assert rollout.reason == "low_score"
        [trace] = rollout.traces
        assert MARKER in trace.token_ids[trace.versions >= 0].tolist()
    with sqlite3.connect(tmp_path / "run" / "journal.db") as db:
        states = dict(db.execute("SELECT id, state FROM rollouts"))
    assert {states[rollout.id] for rollout in ended} == {"dropped"}


@pytest.mark.slow
def test_a_run_outlives_the_process_of_its_reward_model(tmp_path: Path, reward_model: Path) -> None:
    process = start(*arguments(tmp_path, **{"run.versions": 12, "evaluate.prompts": 0, "observe.display": "plain"}))
    journal = tmp_path / "run" / "journal.db"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and _trained(journal) < 2:
        time.sleep(0.2)
    os.kill(worker_pids(tmp_path / "run")["scorer-0"], signal.SIGKILL)
    output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert read_ledgers(tmp_path / "run")["balanced"]
    scored = list(Run(tmp_path / "run").rollouts("reward IS NOT NULL"))
    assert len(scored) >= 12 * 2 * 4
    assert "scorer-0 died: killed by signal 9; it is started again" in output


def _trained(journal: Path) -> int:
    try:
        with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as db:
            [(count,)] = db.execute("SELECT count(*) FROM steps")
    except sqlite3.OperationalError:
        return 0
    return int(count)

"""Real runs: per-step credit with several updates a step, and a critic that is resumed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runs import QUICKSTART, headrace, small_settings

import headrace as library
from headrace.training.checkpoints.base import latest

SCORER = """
from headrace.scoring.base import Scorer
from headrace.types import Score


class Halves(Scorer):
    version = "1"

    async def score(self, ended):
        [turn] = ended.turns
        middle = (turn.start + turn.end + 1) // 2
        steps = [(turn.start, middle), (middle, turn.end)] if middle < turn.end else [(turn.start, turn.end)]
        return [Score(value=float(start % 2), level="step", start=start, end=end) for start, end in steps]
"""


def records(run: Path) -> list[dict]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "step" and line["objective"] == "policy"]


def words(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_steps_are_credited_and_trained_twice(tmp_path: Path) -> None:
    (tmp_path / "halves.py").write_text(SCORER)
    settings = small_settings(
        tmp_path, f"scorers.halves.scorer={tmp_path}/halves.py:Halves", "scorers.halves.weight=0.5", "run.versions=2",
        "algorithm.credit=step", "algorithm.minibatches=2", "algorithm.epochs=2", "algorithm.mask_overlong=true",
        "algorithm.reward_kl=k1", "algorithm.entropy_target=10.0", 'algorithm.corrections=["sequence_tis"]',
        "evaluate.prompts=0",
    )  # fmt: skip
    done = headrace("train", str(QUICKSTART), *words(settings))
    assert done.returncode == 0, done.stderr
    rollouts = list(library.Run(tmp_path / "run").rollouts())
    assert any(len([score for score in each.scores if score.level == "step"]) == 2 for each in rollouts)
    steps = records(tmp_path / "run")
    assert [step["step"] for step in steps] == [1, 2], "a batch is one step"
    assert all(np.isfinite(step["loss"]) and not step["skipped"] for step in steps)
    assert steps[1]["entropy_weight"] != steps[0]["entropy_weight"] == 0.0
    assert steps[1].keys() >= {"loss/policy", "loss/entropy", "reward_kl", "sequence_tis_fraction"}


@pytest.mark.slow
def test_a_critic_needs_no_group_and_is_resumed(tmp_path: Path) -> None:
    settings = small_settings(
        tmp_path, "algorithm.critic=true", "algorithm.value_weight=0.1", "rollouts.group_size=1", "buffer.groups=8",
        "run.versions=2", "evaluate.prompts=0", "algorithm.length_penalty=0.5",
    )  # fmt: skip
    done = headrace("train", str(QUICKSTART), *words(settings))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    assert (latest(run / "checkpoints") / "trainer" / "critic.safetensors").is_file()
    done = headrace("resume", str(run), "--set", "run.versions=3")
    assert done.returncode == 0, done.stderr
    steps = records(run)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert steps[0]["value"] == 0.0, "the head begins at zero"
    assert all(step["value"] != 0.0 for step in steps[1:]), "also after the resume"
    assert all(step["value_loss"] > 0 for step in steps)


SEVERAL_UPDATES = (
    "run.versions=3", "evaluate.prompts=0", "buffer.depth=0", "training.checkpoint_every=1", "pipeline.record=true",
    "training.learning_rate=1e-3", "algorithm.critic=true", "algorithm.value_weight=0.1", "algorithm.minibatches=2",
    "algorithm.epochs=2", "algorithm.loss=decoupled_ppo", "algorithm.proximal=recomputed",
    "algorithm.entropy_target=10.0",
)  # fmt: skip


def versions(run: Path) -> list[tuple[int, str]]:
    """The weights after each step, as they were published."""
    with sqlite3.connect(run / "journal.db") as db:
        return db.execute("SELECT DISTINCT step, digest FROM versions ORDER BY step").fetchall()


@pytest.mark.slow
def test_kills_in_mid_epoch_change_nothing_and_a_replay_gives_the_same(
    tmp_path: Path, stop: Callable[..., Path]
) -> None:
    """A warm start makes two updates, and every step four: the third one of the second step never ends."""
    straight = words(small_settings(tmp_path / "straight", *SEVERAL_UPDATES))
    done = headrace("train", str(QUICKSTART), *straight)
    assert done.returncode == 0, done.stderr
    expected = versions(tmp_path / "straight" / "run")
    assert len({digest for _, digest in expected}) == len(expected) == 4
    for directory, victim in ((tmp_path / "trainer", "self"), (tmp_path / "all", "controller")):
        stopped = stop("trainer", "headrace.training.trainer:accumulate", 2 + 4 + 3, victim)
        stopped.unlink(missing_ok=True)
        done = headrace("train", str(QUICKSTART), *words(small_settings(directory, *SEVERAL_UPDATES)))
        assert stopped.exists()
        run = directory / "run"
        if victim == "controller":
            assert done.returncode == -9
            done = headrace("resume", str(run))
        assert done.returncode == 0, done.stderr
        assert versions(run) == expected, "the weights of an undisturbed run, to the bit"
        summary = json.loads((run / "summary.json").read_text())
        assert summary["ledger"]["trained"] == 3 * 4, "a group is consumed once"
        assert [step["step"] for step in records(run)] == [1, 2, 3]
        again = headrace("replay", str(run), "--json")
        assert again.returncode == 0 and json.loads(again.stdout)["identical"], again.stdout + again.stderr

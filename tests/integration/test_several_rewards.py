"""Several reward functions with weights, in both styles, make one reward, and each is recorded under its name."""

from __future__ import annotations

import json
from pathlib import Path

from runs import QUICKSTART, headrace

import headrace as library

REWARDS = """
def right(completions, answer, **kwargs):
    assert kwargs["prompts"] and kwargs["completion_ids"]
    return [float(text == right) for text, right in zip(completions, answer)]


def short(completion):
    return {"reward": 1 / (1 + len(completion)), "letters": len(completion)}


async def sometimes(completions, answer):
    return [0.25 if "c" in right else None for right in answer]
"""


def test_a_list_of_rewards_with_weights(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    names = ("right", "short", "sometimes")
    settings = [
        f"task.reward={json.dumps([f'{tmp_path}/rewards.py:{name}' for name in names])}",
        "task.reward_weights=[1.0, 0.5, 2.0]", f"run.directory={tmp_path}", "run.name=several", "run.versions=2",
        "rollouts.group_size=2", "buffer.groups=4", "rollouts.max_tokens=8", "warm_start.steps=0", "evaluate.prompts=2",
        "evaluate.every=0", "observe.display=none",
    ]  # fmt: skip
    done = headrace("train", str(QUICKSTART), *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 0, done.stderr
    rollouts = list(library.Run(tmp_path / "several").rollouts())
    assert len(rollouts) == 2 * 4 * 2
    seen = set()
    for rollout in rollouts:
        scores = {score.scorer: score.value for score in rollout.scores}
        seen |= scores.keys()
        assert scores.keys() >= {"right", "short"}
        expected = scores["right"] + 0.5 * scores["short"] + 2.0 * scores.get("sometimes", 0.0)
        assert rollout.reward == expected
        assert scores["short"] == 1 / (1 + rollout.metrics["letters"])
    assert seen == set(names)
    assert any(len(rollout.scores) == 2 for rollout in rollouts), "no prompt was left unjudged"

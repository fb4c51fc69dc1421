"""`headrace.train(...)`: five lines do what the command line does, also inside a running event loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import ROOT

import headrace

SETTINGS = {
    "model.weights": "random",
    "run.versions": 3,
    "rollouts.group_size": 4,
    "rollouts.max_tokens": 8,
    "buffer.groups": 2,
    "engine.max_length": 64,
}


async def test_train_returns_a_run(tmp_path: Path) -> None:
    seen = []

    def reward(completion: str, prompt: str, wanted: str) -> float:
        seen.append((prompt, wanted))
        return float(completion.count(wanted))

    run = headrace.train(
        model=ROOT / "examples/quickstart/model",
        prompts=[{"prompt": "ab", "wanted": "a"}, {"prompt": "cd", "wanted": "c"}],
        reward=reward,
        settings={**SETTINGS, "run.directory": str(tmp_path)},
        display="none",
    )
    assert len(run.history) == 3
    rollouts = list(run.rollouts())
    assert len(rollouts) == 3 * 2 * 4 == len(seen)
    assert set(seen) == {("ab", "a"), ("cd", "c")}
    assert all(rollout.reward is not None for rollout in rollouts)
    assert (run.model_dir / "model.safetensors").is_file()
    assert run.summary["ledger"]["trained"] == 6


def test_mistakes_are_user_errors(tmp_path: Path) -> None:
    common = {"model": "nowhere", "prompts": ["a"], "reward": lambda completion: 0.0}
    with pytest.raises(headrace.UserError, match="nowhere is not a directory"):
        headrace.train(**common, settings={"run.directory": str(tmp_path)}, display="none")
    with pytest.raises(headrace.UserError, match="unknown key"):
        headrace.train(**common, settings={"buffer.size": 3}, display="none")
    with pytest.raises(headrace.UserError, match=r"section\.key"):
        headrace.train(**common, settings={"versions": 3}, display="none")
    assert list(tmp_path.iterdir()) == []

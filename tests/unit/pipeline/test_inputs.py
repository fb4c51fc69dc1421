"""What a run begins with, as its configuration asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config import make_config
from headrace.config.model_dir import model_facts
from headrace.errors import ConfigError
from headrace.pipeline.trial import Tried, try_inputs

QUICKSTART = "examples/quickstart"
FILE = {"heldout_path": f"{QUICKSTART}/heldout.jsonl"}


def configured(task: dict[str, Any], **evaluate: int) -> Any:
    files = {"kind": "dataset", "path": f"{QUICKSTART}/train.jsonl", "reward": f"{QUICKSTART}/reward.py:reward"}
    model = {"path": f"{QUICKSTART}/model", "weights": "random"}
    return make_config({"run": {"name": "run"}, "model": model, "task": files | task, "evaluate": evaluate})


def tried(config: Any) -> Tried:
    return try_inputs(config, model_facts(Path(config.model.path), config.model.weights))


@pytest.mark.parametrize(
    ("task", "evaluate", "expected"),
    [
        (FILE, {}, (8000, 1000)),
        (FILE, {"prompts": 7}, (8000, 7)),
        (FILE, {"prompts": 0}, (8000, 0)),
        ({}, {}, (8000, 0)),
        ({}, {"prompts": 7}, (7993, 7)),
    ],
)
def test_as_many_prompts_are_held_out_as_the_configuration_says(task, evaluate, expected):
    found = tried(configured(task, **evaluate))
    assert (found.train_prompts, found.heldout_prompts) == expected


def test_evaluations_during_a_run_need_prompts():
    assert configured(FILE, every=5).evaluate.every == 5
    for task, evaluate in ((FILE, {"prompts": 0}), ({}, {})):
        with pytest.raises(ConfigError, match=r"\[evaluate\] every: needs prompts > 0"):
            configured(task, every=5, **evaluate)


def test_a_wrong_reward_function_is_named_by_its_key():
    with pytest.raises(ConfigError, match=r"^\[task\] reward: .* has no 'nothing'"):
        tried(configured({"reward": f"{QUICKSTART}/reward.py:nothing"}))

"""What a run begins with, as its configuration asks for it."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.config import dump_config, make_config
from headrace.config.hub import pinned
from headrace.config.model_dir import model_facts
from headrace.errors import ConfigError, ModelError
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


@pytest.fixture
def base_model(tmp_path: Path) -> dict[str, str]:
    """The quickstart's model without its chat template."""
    model = tmp_path / "base"
    shutil.copytree(f"{QUICKSTART}/model", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return {"path": str(model), "weights": "random"}


def test_chat_prompts_for_a_model_without_a_template_are_refused(base_model, tmp_path):
    config = configured({})
    with pytest.raises(ModelError, match=r"no chat template, .*: set \[model\] chat_template, or \[task\] format = "):
        tried(changed(config, model=base_model))
    plain = tried(changed(configured({"format": "text"}), model=base_model))
    assert (plain.train_prompts, plain.heldout_prompts) == (8000, 0)
    (tmp_path / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    own = pinned(changed(config, model={**base_model, "chat_template": str(tmp_path / "chat.jinja")})).config
    assert own.model.chat_template == (tmp_path / "chat.jinja").read_text()
    assert tried(own).train_prompts == 8000


def test_what_does_not_go_together_is_one_line():
    with pytest.raises(ConfigError, match=r"\[task\] system: goes with chat messages"):
        tried(configured({"format": "text", "system": "Be brief."}))
    with pytest.raises(ConfigError, match=r"\[task\] heldout_split: is for datasets on the hub"):
        tried(configured({"heldout_split": "test"}))
    with pytest.raises(ConfigError, match=r"\[task\] revision: is for names on the hub"):
        pinned(configured({"revision": "v1"}))
    with pytest.raises(ConfigError, match=r"\[model\] chat_template: .*/none\.jinja cannot be read: No such file"):
        pinned(changed(configured({}), model={"path": f"{QUICKSTART}/model", "chat_template": "none.jinja"}))


def changed(config, **sections):
    return make_config({**tomllib.loads(dump_config(config)), **sections})

"""What is wrong with a section of a process-reward model is one line, before any process starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from headrace.config import load_config
from headrace.config.model_dir import read_object
from headrace.errors import HeadraceError
from headrace.pipeline.inputs import make_stage
from headrace.scoring.process_reward import ProcessRewardScorer

EXAMPLE = Path(__file__).parents[3] / "examples/steps"


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """The files of a reward model, as far as they are looked at before it is loaded."""
    path = tmp_path / "reward_model"
    shutil.copytree(EXAMPLE / "model", path)
    text = (path / "config.json").read_text().replace("LlamaForCausalLM", "LlamaForTokenClassification")
    (path / "config.json").write_text(text.replace("{", '{"id2label": {"0": "bad", "1": "good"},', 1))
    save_file({}, path / "model.safetensors")
    assert read_object(path / "config.json")["id2label"]["1"] == "good"
    return path


def made(reward_model: Path, **keys: Any) -> ProcessRewardScorer:
    settings = {"model": reward_model, **keys}
    config = load_config(EXAMPLE / "steps.toml", [f"scorers.steps.{key}={value}" for key, value in settings.items()])
    scorer = make_stage(config).scorers["steps"]
    assert isinstance(scorer, ProcessRewardScorer)
    return scorer


def test_markers_are_all_tokens_that_contain_the_text(reward_model: Path) -> None:
    vocabulary = read_object(EXAMPLE / "model" / "tokenizer.json")["model"]["vocab"]
    assert made(reward_model).step_token_ids == (vocabulary[";"],)
    some = made(reward_model, markers='["a", "end"]').step_token_ids
    assert set(some) == {vocabulary["a"], vocabulary["<|end|>"], vocabulary["<|assistant|>"], vocabulary["<pad>"]}
    assert made(reward_model, when="end").step_token_ids == ()


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"model": "missing"}, "[scorers.steps] model: "),
        ({"model": ""}, "[scorers.steps] model: give the directory of the process-reward model"),
        ({"markers": "[]"}, "[scorers.steps] markers: give at least one text"),
        ({"markers": '["xyz"]'}, "[scorers.steps] markers: no token of "),
        ({"good": "great"}, "has no label 'great' (it has bad, good)"),
        ({"bad": "bad"}, "is a token classifier, and `bad` is for causal language models"),
        ({"good": "", "bad": "-"}, "[scorers.steps] bad: '-' is compared with `good`, which is not given"),
        ({"tag": "<tag>"}, "[scorers.steps] tag: '<tag>' is not a token of "),
        ({"cancel_below": 0.5, "when": "end"}, "[scorers.steps] cancel_below: with when"),
        ({"cancel_below": 1.5}, "[scorers.steps] cancel_below: "),
        ({"whole": "max"}, "[scorers.steps] whole: "),
    ],
)
def test_a_mistake_is_one_line(reward_model: Path, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        made(reward_model, **keys)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_with_another_tokenizer_is_refused(reward_model: Path) -> None:
    file = reward_model / "tokenizer.json"
    file.write_text(file.read_text().replace('"?"', '"!"'))
    with pytest.raises(HeadraceError, match=r"\[scorers.steps\] model: .* has another tokenizer: token \d+, '\?'"):
        made(reward_model)


def test_a_language_model_needs_the_token_of_a_good_step(reward_model: Path) -> None:
    shutil.copy(EXAMPLE / "model" / "config.json", reward_model / "config.json")
    with pytest.raises(HeadraceError, match="`good` must name the token of a good step"):
        made(reward_model, good="")
    with pytest.raises(HeadraceError, match="'great' is not a token of"):
        made(reward_model, good="great")
    made(reward_model, good="+", bad="-")


def test_whole_answers_need_a_reward_beside_the_scores_of_steps() -> None:
    without = ["task.reward=[]"]
    line = r"^\[task\] reward is required, or \[scorers.steps\] whole: it scores steps, not answers$"
    with pytest.raises(HeadraceError, match=line):
        load_config(EXAMPLE / "steps.toml", without)
    load_config(EXAMPLE / "steps.toml", [*without, "scorers.steps.whole=min"])
    load_config(EXAMPLE / "steps.toml", [*without, "scorers.big.scorer=judge.py:Judge"])

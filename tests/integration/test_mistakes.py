"""A mistake of the user's is one clear line and exit code 2, and it leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from runs import QUICKSTART, ROOT, headrace, small_settings
from safetensors.torch import load_file, save_file

from headrace.models.loading import load_model


def refused(*arguments: str) -> str:
    """The one line with which this call is refused."""
    done = headrace(*arguments)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("headrace: ")
    return lines[0].removeprefix("headrace: ")


def train(directory: Path, *settings: str) -> str:
    chosen = [part for setting in small_settings(directory, *settings) for part in ("--set", setting)]
    line = refused("train", str(QUICKSTART), *chosen)
    assert not (directory / "run").exists(), "a refused run leaves no directory"
    return line


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("buffer.dephts=2", "[buffer] unknown key 'dephts' (did you mean 'depth'?)"),
        ('buffer.depth="two"', "[buffer] depth: invalid enum value 'two' (one of: a number, unbounded)"),
        ("rollouts.group_size=0", "[rollouts] group_size: expected `int` >= 1"),
        ("task.path=nowhere.jsonl", "nowhere.jsonl: there is no such file"),
        ("model.path=nowhere", f"[model] path: {ROOT}/nowhere is not a directory"),
        ("model.weights=load", "has no *.safetensors weights"),
        ("rollouts.stop=['<|no|>']", "<|no|>"),
        ("task.reward=examples.nothing:reward", "examples.nothing"),
        ("task.reward=examples/quickstart/reward.py:nothing", "nothing"),
    ],
)
def test_a_wrong_value_is_named(tmp_path: Path, setting: str, expected: str) -> None:
    assert expected in train(tmp_path, setting)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ('{"prompt": "ab"}\n{"prompt": "b\n', "line 2"),
        ('{"prompt": "ab"}\n{"question": "b"}\n', 'line 2 has no "prompt"'),
    ],
)
def test_a_dataset_error_names_the_line(tmp_path: Path, content: str, expected: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    line = train(tmp_path, f"task.path={data}")
    assert str(data) in line
    assert expected in line


def test_a_reward_that_raises_on_import(tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text("import json\nraise RuntimeError('no licence')\n")
    assert "no licence" in train(tmp_path, f"task.reward={reward}:reward")


@pytest.mark.parametrize("missing", ["tokenizer.json", "config.json"])
def test_an_incomplete_model_directory(tmp_path: Path, missing: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples/quickstart/model", model)
    (model / missing).unlink()
    assert f"has no {missing}" in train(tmp_path, f"model.path={model}")


@pytest.mark.parametrize("damage", ["pointer", "missing"])
def test_friction_35_broken_weights_are_one_line(tmp_path: Path, damage: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples/quickstart/model", model)
    load_model(model, weights="random").save_pretrained(model)
    weights = model / "model.safetensors"
    if damage == "pointer":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
        expected = f"[model] path: {weights} is a pointer of git-lfs and not the weights"
        assert expected in refused(
            "check", str(QUICKSTART), "--set", f"model.path={model}", "--set", "model.weights=load"
        )
    else:
        tensors = load_file(weights)
        del tensors["model.norm.weight"]
        save_file(tensors, weights, {"format": "pt"})
        expected = f"the weights in {model} do not fit its config.json: model.norm.weight is missing"
    assert expected in train(tmp_path, f"model.path={model}", "model.weights=load")


def test_a_model_that_would_be_served_wrongly(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "examples/quickstart/model", model)
    bloom = {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 64, "n_layer": 2, "n_head": 2}
    (model / "config.json").write_text(json.dumps({**bloom, "vocab_size": 64}))
    line = train(tmp_path, f"model.path={model}")
    assert "Bloom" in line


def test_what_the_trainer_refuses_leaves_no_directory_in_the_way(tmp_path: Path) -> None:
    line = train(tmp_path, "training.learning_rates={nowhere=2.0}")
    assert line == "[training] learning_rates: no trainable parameter has 'nowhere' in its name"
    chosen = [part for setting in small_settings(tmp_path, "run.versions=1") for part in ("--set", setting)]
    assert headrace("train", str(QUICKSTART), *chosen).returncode == 0


def test_a_run_directory_that_exists_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    chosen = [part for setting in small_settings(tmp_path) for part in ("--set", setting)]
    line = refused("train", str(QUICKSTART), *chosen)
    assert f"{tmp_path / 'run'} exists" in line
    assert "headrace resume" in line
    assert (tmp_path / "run" / "mine.txt").read_text() == "mine"


def test_other_commands(tmp_path: Path) -> None:
    assert "no such configuration file" in refused("train", "nothing.toml")
    assert "nothing.py" in refused("check", str(QUICKSTART), "--set", "task.reward=nothing.py:reward")
    assert "no such run directory" in refused("resume", str(tmp_path / "nothing"))
    assert "not a run directory" in refused("resume", str(tmp_path))
    assert "journal.db" in refused("report", str(tmp_path))
    assert "not a directory" in refused("generate", "nothing", "--input", "a", "--output", "b")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "ab", "max_tokens": 0}\n')
    model = str(ROOT / "examples/quickstart/model")
    arguments = ("--random-weights", "--input", str(lines), "--output", str(tmp_path / "out"))
    assert "line 1" in refused("generate", model, *arguments)

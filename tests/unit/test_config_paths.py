"""Relative paths in a configuration: what they follow, and what is not taken for a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import DatasetTaskConfig, dump_config, load_config, make_config, with_settings
from headrace.run_dir import RunDir

TOML = """
[model]
path = "model"
chat_template = "chat.jinja"

[task]
kind = "dataset"
path = "data/train.jsonl"
heldout_path = "../heldout.csv"
reward = ["rewards.py:right", "my.rewards:short"]
system = "read file.py:main"

[scorers.short]
scorer = "scorers/short.py:Short"
config = {file = "its own.py:words"}

[algorithm]
loss = "losses.py:loss"

[training]
checkpoint_directory = "checkpoints"

[observe]
trackers = ["wandb", "track.py:Own"]

[observe.tracker_options.wandb]
directory = "logs"

[observe.tracker_options."track.py:Own"]
file = "its own.py:words"

[engine]
kind = "vllm"
python = "venv/bin/python"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with its TOML; the working directory is another one."""
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for path in (project / "model", elsewhere):
        path.mkdir(parents=True)
    (project / "run.toml").write_text(TOML)
    monkeypatch.chdir(elsewhere)
    return project


def test_paths_follow_the_toml_and_outputs_the_working_directory(project: Path) -> None:
    for file in (project / "run.toml", Path("../project/run.toml")):
        config = load_config(file)
        assert isinstance(config.task, DatasetTaskConfig)
        assert config.model.path == str(project / "model")
        assert config.model.chat_template == str(project / "chat.jinja")
        assert config.task.path == str(project / "data/train.jsonl")
        assert config.task.heldout_path == str(project.parent / "heldout.csv")
        assert config.task.reward == [f"{project}/rewards.py:right", "my.rewards:short"]
        assert config.task.system == "read file.py:main"
        assert config.scorers["short"].scorer == f"{project}/scorers/short.py:Short"
        assert config.scorers["short"].config == {"file": "its own.py:words"}
        assert config.algorithm.loss == f"{project}/losses.py:loss"
        own = f"{project}/track.py:Own"
        assert config.observe.trackers == ["wandb", own]
        assert config.observe.tracker_options == {"wandb": {"directory": "logs"}, own: {"file": "its own.py:words"}}
        assert config.engine.python == f"{project}/venv/bin/python"
        assert config.training.checkpoint_directory == str(Path.cwd() / "checkpoints")
        assert config.run.directory == "runs"


def test_a_setting_follows_the_working_directory(project: Path) -> None:
    more = ["model.path=other", "task.reward=mine.py:reward", "scorers.short.scorer=short.py:Short"]
    config = load_config(project / "run.toml", [*more, "engine.python=python3", "delivery.directory=s3://bucket/w"])
    assert isinstance(config.task, DatasetTaskConfig)
    assert config.model.path == str(Path.cwd() / "other")
    assert config.task.reward == f"{Path.cwd()}/mine.py:reward"
    assert config.scorers["short"].scorer == f"{Path.cwd()}/short.py:Short"
    assert config.engine.python == "python3"
    assert config.delivery.directory == "s3://bucket/w"


def test_a_name_on_the_hub_stays_unless_there_is_such_a_directory(project: Path) -> None:
    raw = {"model": {"path": "acme/tiny"}, "task": {"kind": "dataset", "path": "acme/sums", "reward": "m:f"}}
    config = make_config(raw, base=project)
    assert (config.model.path, config.task.path) == ("acme/tiny", "acme/sums")  # type: ignore[union-attr]
    (project / "acme/tiny").mkdir(parents=True)
    assert make_config(raw, base=project).model.path == str(project / "acme/tiny")
    pinned = {**raw, "model": {"path": "acme/tiny", "revision": "v1"}}
    assert make_config(pinned, base=project).model.path == "acme/tiny"
    assert make_config({**raw, "model": {"path": "acme/tiny@v1"}}, base=project).model.path == "acme/tiny@v1"
    # Names of data files are never names on the hub, whether the files exist or not.
    files = {**raw, "task": {**raw["task"], "path": "data/train.jsonl"}}
    assert make_config(files, base=project).task.path == str(project / "data/train.jsonl")  # type: ignore[union-attr]


def test_a_saved_configuration_is_the_same_from_everywhere(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(project / "run.toml", ["run.name=saved"])
    run_dir = RunDir.create(config).path.absolute()
    monkeypatch.chdir(project)
    assert RunDir.open(run_dir)[1] == config == with_settings(config, [])
    assert '"model"' not in dump_config(config)


def test_the_relative_paths_of_an_older_run_follow_the_working_directory(project: Path) -> None:
    old = project / "runs/old"
    old.mkdir(parents=True)
    (old / "config.toml").write_text(TOML)
    config = RunDir.open(old)[1]
    assert config.model.path == str(Path.cwd() / "model")

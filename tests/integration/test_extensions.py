"""Parts of the user's own, named in the TOML: the code of docs/extending.md is written into files and trained with."""

from __future__ import annotations

import re
import sqlite3
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from runs import NAME, QUICKSTART, ROOT, headrace, small_settings

from headrace.observe.metrics import read_metrics

PAGE = (ROOT / "docs/extending.md").read_text()


def code_of_the_page(folder: Path) -> dict[str, Any]:
    """Write the page's files into a folder; the settings that its TOML names them with, by `section.key`."""
    blocks = re.findall(r"^```python\n# (\w+\.py)(, continued)?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for name, continued, code in blocks:
        assert len(code.strip().splitlines()) < 30, f"{name} on docs/extending.md is too long to be an example"
        (folder / name).write_text(f"{(folder / name).read_text()}\n\n{code}" if continued else code)
    settings: dict[str, Any] = {}
    for block in re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for section, keys in tomllib.loads(block).items():
            settings |= {f"{section}.{key}": in_folder(value, folder) for key, value in keys.items()}
    return settings


def in_folder(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [in_folder(each, folder) for each in value]
    return f"{folder / value}" if isinstance(value, str) and (folder / value.partition(":")[0]).is_file() else value


def given(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def call(command: str, *settings: str, options: Sequence[str] = ()) -> str:
    words = [word for setting in settings for word in ("--set", setting)]
    done = headrace(command, str(QUICKSTART), *options, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    records = read_metrics(run_dir / "metrics.jsonl")
    return [record for record in records if record["kind"] == "step" and record["objective"] == "policy"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mine")


@pytest.fixture(scope="module")
def settings(folder: Path) -> dict[str, Any]:
    return code_of_the_page(folder)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> Path:
    """A run in which every part that can be the user's own is."""
    path = tmp_path_factory.mktemp("runs")
    call("train", *small_settings(path, "run.versions=2", "training.checkpoint_every=1", *given(settings)))
    return path / NAME


def test_check_takes_the_page(settings: dict[str, Any]) -> None:
    said = call("check", *given(settings), options=["--full"])
    for value in settings.values():
        assert all(each in said for each in (value if isinstance(value, list) else [value]))


def test_the_loss_and_the_advantage_were_used(run_dir: Path) -> None:
    steps = steps_of(run_dir)
    assert len(steps) == 2
    # The metric is the loss's own; the advantages that it saw are those of `better_half`, all of size one.
    assert [step["advantage_size"] for step in steps] == [pytest.approx(1.0)] * 2
    assert all("clip_fraction" not in step for step in steps), "a built-in loss was used"


def test_the_transport_was_used(run_dir: Path) -> None:
    # What was released is gone; the newest version stays, under the name that the sender gave it.
    assert [path.name for path in (run_dir / "weights").iterdir()] == ["2.safetensors"]
    with sqlite3.connect(run_dir / "journal.db") as journal:
        assert journal.execute("SELECT version FROM deliveries WHERE accepted").fetchall() == [(0,), (1,), (2,)]


def test_the_launcher_was_used(run_dir: Path) -> None:
    assert sorted((run_dir / "launched.txt").read_text().split()) == ["engine-0", "trainer-0"]


def test_the_tracker_was_used(run_dir: Path) -> None:
    expected = [f"{step['step']},{step['reward']}" for step in steps_of(run_dir)]
    assert (run_dir / "rewards.csv").read_text().split() == expected
    assert len(expected) == 2


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Failing:\n"
        "    def start(self, run, config): ...\n"
        "    def log(self, record): raise OSError('no network')\n"
        "    def close(self): ...\n"
    )
    own = f"observe.trackers=['{tmp_path / 'mine.py'}:Failing']"
    said = call("train", *small_settings(tmp_path, "run.versions=1", own, "observe.display=plain"))
    [line] = [line for line in said.splitlines() if "no network" in line]
    assert line == (
        f"[observe] trackers: {tmp_path / 'mine.py'}:Failing raised OSError: no network (mine.py, line 3); "
        "it is switched off"
    )
    assert len(steps_of(tmp_path / NAME)) == 1


def test_such_a_run_replays_and_goes_on(run_dir: Path) -> None:
    replayed = headrace("replay", str(run_dir))
    assert replayed.returncode == 0, replayed.stderr
    resumed = headrace("resume", str(run_dir), "--set", "run.versions=3")
    assert resumed.returncode == 0, resumed.stderr
    assert [step["advantage_size"] for step in steps_of(run_dir)] == [pytest.approx(1.0)] * 3


def test_several_ranks_load_the_loss(tmp_path: Path, settings: dict[str, Any]) -> None:
    chosen = ("algorithm.loss", "algorithm.advantage")
    own = given({key: value for key, value in settings.items() if key in chosen})
    call("train", *small_settings(tmp_path, "run.versions=1", "training.ranks=2", "evaluate.prompts=0", *own))
    assert [step["advantage_size"] for step in steps_of(tmp_path / NAME)] == [pytest.approx(1.0)]


def test_a_loss_is_given_the_policies_that_it_declares(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from headrace.algorithms.losses.base import TokenLoss\n"
        'NEEDS = ("reference", "entropy")\n'
        "def build(config):\n"
        "    return lambda inputs: TokenLoss(inputs.logprobs - inputs.reference - inputs.entropy,\n"
        "        {'apart': (inputs.logprobs - inputs.reference).detach().sum()})\n"
    )
    own = f"algorithm.loss={tmp_path / 'mine.py'}:build"
    call("train", *small_settings(tmp_path, "run.versions=2", "evaluate.prompts=0", own))
    first, second = [step["apart"] for step in steps_of(tmp_path / NAME)]
    assert first == pytest.approx(0.0, abs=1e-5), "the reference is what the first step begins with"
    assert second != pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("algorithm.loss=nowhere.py:build", "[algorithm] loss: there is no file "),
        ("algorithm.loss=no_such.place:build", "[algorithm] loss: there is no module 'no_such.place'"),
        ("algorithm.loss={folder}/my_loss.py:bild", "has no 'bild'"),
        ("algorithm.loss={folder}/broken.py:build", "[algorithm] loss: broken.py is not Python"),
        ("algorithm.loss={folder}/wrong.py:build", "Expected `array`, got `str` - at `$.needs`"),
        ("algorithm.advantage={folder}/my_advantage.py:worse_half", "has no 'worse_half'"),
        ("algorithm.advantage={folder}/my_advantage.py:__name__", "[algorithm] advantage: "),
        ("delivery.transport={folder}/my_transport.py:Pigeons", "has no 'Pigeons'"),
        ("engine.kind={folder}/nowhere.py:Mine", "[engine] kind: there is no file"),
        ("pipeline.launcher={folder}/nowhere.py:Mine", "[pipeline] launcher: there is no file"),
        ("observe.trackers=['{folder}/my_tracker.py:Mine']", "[observe] trackers: "),
    ],
)
def test_a_wrong_reference_is_one_line(settings: dict[str, Any], folder: Path, setting: str, expected: str) -> None:
    (folder / "broken.py").write_text("def build(config:\n")
    (folder / "wrong.py").write_text('NEEDS = "teacher"\ndef build(config): ...\n')
    done = headrace("check", str(QUICKSTART), "--set", setting.format(folder=folder))
    [line] = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert expected in line


@pytest.mark.parametrize(
    ("code", "more", "expected"),
    [
        ('NEEDS = ("teacher",)', "", "[algorithm] teacher: loss '{loss}' needs the directory"),
        ("", 'algorithm.corrections=["tis"]', "corrections: 'tis' limits importance weights, and loss '{loss}'"),
        ("USES_REWARDS = False", 'algorithm.corrections=["opsm"]', "'opsm' goes by rewards, which loss '{loss}'"),
        ("READS = ()", "algorithm.clip_high=0.1", "[algorithm] clip_high: loss '{loss}' does not look at it"),
        ("", "rollouts.group_size=1", "[rollouts] group_size: advantage 'grpo' compares answers"),
    ],
)
def test_what_a_loss_declares_is_held_against_the_rest(tmp_path: Path, code: str, more: str, expected: str) -> None:
    (tmp_path / "mine.py").write_text(f"import torch\n{code}\ndef build(config): ...\n")
    loss = f"{tmp_path / 'mine.py'}:build"
    changes = [word for setting in (f"algorithm.loss={loss}", more) if setting for word in ("--set", setting)]
    done = headrace("check", str(QUICKSTART), *changes)
    [line] = done.stderr.strip().splitlines()
    assert expected.format(loss=loss) in line


def test_a_loss_that_cannot_be_made_ends_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def build(config):\n    return 1 / 0\n")
    chosen = small_settings(tmp_path, f"algorithm.loss={tmp_path / 'mine.py'}:build")
    done = headrace("train", str(QUICKSTART), *(word for setting in chosen for word in ("--set", setting)))
    [line] = done.stderr.strip().splitlines()
    assert "mine.py:build raised ZeroDivisionError: division by zero (mine.py, line 2)" in line
    assert not (tmp_path / NAME).exists()


FAILING = """
class Transport:
    def sender(self, settings): raise OSError("no pigeons")
    def source(self, settings): raise OSError("no pigeons")

class Deaf:
    def sender(self, settings):
        from headrace.delivery.transports.shm import Transport
        return Transport().sender(settings)
    def source(self, settings): raise OSError("no ears")

def launcher(environment):
    raise SystemExit(0)

def scorer():
    raise SystemExit(0)
"""


@pytest.mark.parametrize(
    ("key", "attribute", "expected"),
    [
        ("delivery.transport", "Transport", "[delivery] transport: {file}:Transport raised OSError: no pigeons"),
        ("delivery.transport", "Deaf", "[delivery] transport: {file}:Deaf raised OSError: no ears (mine.py, line 10)"),
        ("pipeline.launcher", "launcher", "[pipeline] launcher: {file}:launcher raised SystemExit: 0"),
        ("scorers.mine.scorer", "scorer", "[scorers.mine] scorer: {file}:scorer raised SystemExit: 0"),
    ],
)
def test_a_factory_that_raises_ends_the_run_in_one_line(
    tmp_path: Path, key: str, attribute: str, expected: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FAILING)
    chosen = small_settings(tmp_path, f"{key}={file}:{attribute}")
    done = headrace("train", str(QUICKSTART), *(word for setting in chosen for word in ("--set", setting)))
    assert done.returncode == 2, done.stderr
    [line] = done.stderr.strip().splitlines()
    assert expected.format(file=file) in line


def test_an_advantage_that_fails_ends_the_run_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def short(groups):\n    return [rewards[1:] for rewards in groups]\n")
    chosen = small_settings(tmp_path, f"algorithm.advantage={tmp_path / 'mine.py'}:short")
    done = headrace("train", str(QUICKSTART), *(word for setting in chosen for word in ("--set", setting)))
    assert "mine.py:short did not return one number for each reward" in done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2


def test_a_run_is_reported_where_the_file_is_not(run_dir: Path, folder: Path) -> None:
    kept = (folder / "my_loss.py").read_text()
    (folder / "my_loss.py").unlink()
    try:
        assert headrace("report", str(run_dir)).returncode == 0
        resumed = headrace("resume", str(run_dir), "--set", "run.versions=4")
    finally:
        (folder / "my_loss.py").write_text(kept)
    assert resumed.returncode == 2
    assert "[algorithm] loss: there is no file" in resumed.stderr
    with sqlite3.connect(run_dir / "journal.db") as journal:
        assert journal.execute("SELECT COUNT(*) FROM steps WHERE objective = 'policy'").fetchone() == (3,)

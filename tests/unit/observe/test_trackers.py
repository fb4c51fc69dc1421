"""Trackers: every record reaches them, and their failures and waits stay theirs."""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.observe.metrics import MetricsLog, read_metrics
from headrace.observe.trackers import feed
from headrace.observe.trackers.base import NAMES, find_tracker, numbers_of
from headrace.observe.trackers.feed import Trackers

CODE = """
heard, release = [], threading.Event()

class Listening:
    def start(self, run, config): heard.append((run, config))
    def log(self, record): heard.append(record)
    def close(self): heard.append("closed")

class Choosing(Listening):
    def __init__(self, project="none"): heard.append(project)

class Failing(Listening):
    def log(self, record): raise ValueError("enough")

class Waiting(Listening):
    def log(self, record): release.wait(20)

def broken():
    raise RuntimeError("no account")
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text("import threading\n" + CODE)
    return str(tmp_path / "mine.py")


def module_of(mine: str) -> object:
    from headrace.reference import import_function

    return import_function(f"{mine}:broken").__globals__


def test_they_get_what_the_file_gets(tmp_path: Path, mine: str) -> None:
    trackers = Trackers([f"{mine}:Listening"], "run", {"a": 1}, pytest.fail)
    with closing(MetricsLog(tmp_path / "metrics.jsonl", trackers=trackers)) as log:
        log.write("step", step=1, loss=float("nan"))
        log.write("version", version=1)
    started, *records, closed = module_of(mine)["heard"]
    assert started == ("run", {"a": 1})
    assert records == read_metrics(tmp_path / "metrics.jsonl")
    assert len(records) == 2
    assert closed == "closed"


@pytest.mark.parametrize(
    ("name", "expected"), [("Failing", "raised ValueError: enough"), ("broken", "raised RuntimeError: no account")]
)
def test_one_that_raises_is_switched_off_with_one_note(mine: str, name: str, expected: str) -> None:
    notes: list[str] = []
    trackers = Trackers([f"{mine}:{name}", f"{mine}:Listening"], "run", {}, notes.append)
    for number in range(3):
        trackers.log({"number": number})
    trackers.close()
    assert len(notes) == 1
    assert f"{mine}:{name} {expected}" in notes[0]
    assert [each["number"] for each in module_of(mine)["heard"] if isinstance(each, dict)] == [0, 1, 2]


def test_one_that_waits_holds_nothing_up(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ROOM", 2)
    monkeypatch.setattr(feed, "CLOSE_SECONDS", 0.1)
    notes: list[str] = []
    trackers = Trackers([f"{mine}:Waiting"], "run", {}, notes.append)
    for number in range(4):
        trackers.log({"number": number})
    trackers.close()
    assert len(notes) == 1
    assert "is 2 records behind" in notes[0]
    slow = Trackers([f"{mine}:Waiting"], "run", {}, notes.append)
    slow.log({"number": 0})
    slow.close()
    assert "did not close in 0.1 s" in notes[1]
    module_of(mine)["release"].set()
    for thread in threading.enumerate():
        if thread.name.startswith("tracker"):
            thread.join(60)


def test_options_are_the_arguments_of_the_factory(mine: str) -> None:
    name = f"{mine}:Choosing"
    Trackers([name], "run", {}, pytest.fail, options={name: {"project": "sorting"}}).close()
    assert module_of(mine)["heard"] == ["sorting", ("run", {}), "closed"]
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'projct' \(its options: project\)"):
        find_tracker(name, {"projct": "sorting"})


@pytest.mark.parametrize("name", NAMES)
def test_a_built_in_one_names_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError) as error:
        find_tracker(name, {})
    assert str(error.value) == f'{name!r} needs a package that is not installed: pip install "headrace[{name}]"'


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'wandbb' is none of wandb, tensorboard, mlflow, trackio, and not module"):
        find_tracker("wandbb", {})


def test_the_numbers_of_records() -> None:
    step = {"time": 1.0, "kind": "step", "step": 3, "version": 2, "reward": 0.5, "skipped": True, "score/a": 1}
    assert numbers_of({**step, "objective": "policy", "loss": None}) == {
        "version": 2.0,
        "reward": 0.5,
        "skipped": 1.0,
        "score/a": 1.0,
    }
    assert numbers_of({"time": 1.0, "kind": "step", "step": -3, "objective": "imitation", "nll": 2.0}) == {
        "warm_start/nll": 2.0
    }
    assert numbers_of({"time": 1.0, "kind": "group", "group": 3, "reward": 0.5}) == {}
    assert numbers_of({"time": 1.0, "kind": "version", "version": 1}) == {"published/version": 1.0}

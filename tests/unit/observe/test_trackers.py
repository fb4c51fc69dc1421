"""Trackers: every record reaches them, and their failures and waits stay theirs."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import pytest

from headrace.observe import metrics as feed
from headrace.observe.metrics import MetricsLog, Trackers, read_metrics

CODE = """
heard, release = [], threading.Event()

class Listening:
    def start(self, run, config): heard.append((run, config))
    def log(self, record): heard.append(record)
    def close(self): heard.append("closed")

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

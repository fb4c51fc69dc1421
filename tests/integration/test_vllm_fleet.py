"""Real runs over attached servers that speak vLLM's protocol and compute nothing: what becomes of the run when one dies
and comes back, or answers and does nothing.

The same on real vLLM servers is in `tests/vllm_server/test_fleet.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import QUICKSTART, ROOT, headrace, small_settings, start

from headrace.engines.vllm.server import choose_port

pytestmark = pytest.mark.slow

STUB = ROOT / "tests/unit/engines/vllm_stub.py"
ASSISTANT = 2
"""The token after which an answer begins."""


class StubProcess:
    """A server in a process of its own, which can be started again at the same address."""

    def __init__(self) -> None:
        self.port = choose_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([sys.executable, str(STUB), str(self.port), "0.05"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def ask(self) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/prompts", headers={"Content-Length": "0"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture
def stubs() -> Iterator[list[StubProcess]]:
    both = [StubProcess(), StubProcess()]
    yield both
    for stub in both:
        stub.kill()


@pytest.fixture
def run(stubs: list[StubProcess], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    settings = [
        "run.versions=500",
        "engine.kind=vllm",
        f"engine.urls={json.dumps([stub.url for stub in stubs])}",
        # A swap ends no request: what is resumed by prefix was lost with a server.
        "engine.interrupt=drain",
        "delivery.canary_tolerance=1000",
        "pipeline.stall_seconds=16",
        "observe.display=plain",
    ]
    run = start("train", str(QUICKSTART), *(p for s in small_settings(tmp_path, *settings) for p in ("--set", s)))
    yield run
    run.kill()
    run.communicate(timeout=60)


def until(what: str, holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 100
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not in time"
        time.sleep(0.1)


def rows(run_dir: Path, query: str) -> list[tuple[object, ...]]:
    try:
        with sqlite3.connect(f"file:{run_dir / 'journal.db'}?mode=ro", uri=True) as db:
            return db.execute(query).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error) or "unable to open" in str(error):
            return []  # The run has not begun.
        raise


def steps(run_dir: Path) -> int:
    return len(rows(run_dir, "SELECT 1 FROM steps WHERE objective = 'policy'"))


def proved(run_dir: Path, engine: str) -> list[int]:
    query = f"SELECT version FROM deliveries WHERE accepted AND engine = '{engine}' ORDER BY rowid"
    return [int(str(version)) for (version,) in rows(run_dir, query)]


def end(run: subprocess.Popen[str], run_dir: Path) -> str:
    """Drain the run; its ledgers are balanced and nothing has failed."""
    run.send_signal(signal.SIGINT)
    stdout, stderr = run.communicate(timeout=60)
    assert run.returncode == 130, stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    for name in ("ledger", "ledger_rollouts"):
        found = summary[name]
        assert found["admitted"] == found["trained"] + found["dropped"] + found["failed"]
        assert found["failed"] == 0, summary
    return stdout


def test_a_server_that_dies_and_is_started_again_rejoins(
    run: subprocess.Popen[str], stubs: list[StubProcess], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    until("training", lambda: steps(run_dir) >= 2 and proved(run_dir, "engine-0"))
    until("work", lambda: stubs[0].ask()["under_way"])
    stubs[0].kill()
    until("its loss", lambda: rows(run_dir, "SELECT 1 FROM restarts WHERE process = 'engine-0'"))
    before, lost_at = steps(run_dir), proved(run_dir, "engine-0")
    until("steps without it", lambda: steps(run_dir) >= before + 3)
    assert proved(run_dir, "engine-0") == lost_at
    stubs[0].start()
    current = proved(run_dir, "engine-1")[-1]
    until("its return", lambda: len(proved(run_dir, "engine-0")) >= len(lost_at) + 2)
    stdout = end(run, run_dir)
    back = proved(run_dir, "engine-0")[len(lost_at)]
    assert back >= current >= lost_at[-1] + 3, "it rejoins at the current version"
    assert "engine-0 died: vLLM died: " in stdout and "; it is started again" in stdout and "engine-0 is back" in stdout
    asked = [prompt for prompt in stubs[1].ask()["prompts"] if ASSISTANT in prompt]
    resumed = [prompt for prompt in asked if prompt[-1] != ASSISTANT]
    assert resumed, "what the dead server had drawn is kept, and goes on elsewhere"


def test_a_server_that_is_not_there_when_a_run_begins_is_one_line(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{choose_port()}"
    more = ["engine.kind=vllm", f"engine.urls={json.dumps([url])}"]
    done = headrace("train", str(QUICKSTART), *(p for s in small_settings(tmp_path, *more) for p in ("--set", s)))
    assert done.returncode == 2
    assert f"headrace: {url} cannot be reached: " in done.stderr and done.stderr.strip().count("\n") == 0
    assert not (tmp_path / "run").exists()


def test_a_server_that_answers_and_makes_no_progress_is_as_good_as_dead(
    run: subprocess.Popen[str], stubs: list[StubProcess], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    until("training", lambda: steps(run_dir) >= 2 and proved(run_dir, "engine-0"))
    until("work", lambda: stubs[0].ask()["under_way"])
    os.kill(stubs[0].process.pid, signal.SIGUSR1)
    until("its loss", lambda: rows(run_dir, "SELECT 1 FROM restarts WHERE process = 'engine-0'"))
    before = steps(run_dir)
    until("steps without it", lambda: steps(run_dir) >= before + 2)
    stubs[0].kill()
    stubs[0].start()
    count = len(proved(run_dir, "engine-0"))
    until("its return", lambda: len(proved(run_dir, "engine-0")) > count)
    assert "engine-0 has requests and sent no token for 8 s: it is ended" in end(run, run_dir)

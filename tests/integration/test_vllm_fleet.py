"""Real runs over attached servers that speak vLLM's protocol and compute nothing: what becomes of the run when one dies
and comes back, or answers and does nothing.

The same on real vLLM servers is in `tests/vllm_server/test_fleet.py`.
"""

from __future__ import annotations

import json
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
from runs import QUICKSTART, ROOT, headrace, small_settings, start, worker_pids

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

    def stick(self) -> bool:
        """Draw no more tokens if requests are under way. Return whether there are any."""
        self.process.send_signal(signal.SIGUSR1)
        if self.ask()["under_way"]:
            return True
        self.process.send_signal(signal.SIGUSR2)
        return False

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
    until("work", stubs[0].stick)
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
    until("work", stubs[0].stick)
    until("its loss", lambda: rows(run_dir, "SELECT 1 FROM restarts WHERE process = 'engine-0'"))
    before = steps(run_dir)
    until("steps without it", lambda: steps(run_dir) >= before + 2)
    stubs[0].kill()
    stubs[0].start()
    count = len(proved(run_dir, "engine-0"))
    until("its return", lambda: len(proved(run_dir, "engine-0")) > count)
    assert "engine-0 has requests and sent no token for 8 s: it is ended" in end(run, run_dir)


def test_servers_are_added_and_removed_while_the_run_is_live(
    run: subprocess.Popen[str], stubs: list[StubProcess], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"

    def scale(*arguments: str) -> tuple[int, str]:
        done = headrace("scale", str(run_dir), *arguments)
        return done.returncode, (done.stdout + done.stderr).strip()

    until("training", lambda: steps(run_dir) >= 2 and proved(run_dir, "engine-0"))
    third, nobody = StubProcess(), f"http://127.0.0.1:{choose_port()}"
    try:
        assert scale("--engines", "3") == (
            2,
            "headrace: [engine] urls names the servers of this run: use --add URL or --remove URL",
        )
        assert scale("--remove", nobody) == (2, f"headrace: --remove {nobody}: it is not one of the run's servers")
        again = f"headrace: --add {stubs[0].url}: it is one of the run's servers already"
        assert scale("--add", stubs[0].url) == (2, again)
        assert scale("--add", "nowhere") == (
            2,
            "headrace: --add nowhere: it is not a URL such as http://127.0.0.1:8000",
        )
        far = scale("--add", "http://192.0.2.1:8000")
        assert far[0] == 2 and "http://192.0.2.1:8000 is on another host" in far[1]
        assert scale("--add", third.url) == (0, "engines 2 -> 3")
        until("its proof", lambda: len(proved(run_dir, "engine-2")) >= 2)
        until("its work", lambda: third.ask()["under_way"])
        until("work", stubs[0].stick)
        known = sum(len(stub.ask()["prompts"]) for stub in (stubs[1], third))
        assert scale("--remove", stubs[0].url) == (0, "engines 3 -> 2")
        until("its end", lambda: "engine-0" not in worker_pids(run_dir))
        stubs[0].process.send_signal(signal.SIGUSR2)
        before = steps(run_dir)
        until("steps without it", lambda: steps(run_dir) >= before + 2)
        left_at = proved(run_dir, "engine-0")
        until("more steps", lambda: steps(run_dir) >= before + 4)
        assert proved(run_dir, "engine-0") == left_at and not stubs[0].ask()["under_way"]
        asked = [prompt for stub in (stubs[1], third) for prompt in stub.ask()["prompts"] if ASSISTANT in prompt]
        assert len(asked) > known and any(prompt[-1] != ASSISTANT for prompt in asked), "its work goes on by prefix"
        # A server that is not there is given up when it has not come, and can be removed before.
        assert scale("--add", nobody) == (0, "engines 2 -> 3")
        assert scale("--remove", nobody) == (0, "engines 3 -> 2")
        until("its end", lambda: set(worker_pids(run_dir)) == {"trainer-0", "engine-1", "engine-2"})
        # A server that was removed may come again.
        assert scale("--add", stubs[0].url) == (0, "engines 2 -> 3")
        until("its return", lambda: len(proved(run_dir, "engine-0")) > len(left_at))
        # A live run can be given to other servers altogether.
        for stub in stubs:
            assert scale("--remove", stub.url)[0] == 0
        assert scale("--remove", third.url) == (2, f"headrace: --remove {third.url}: a run needs at least one engine")
        until("one engine", lambda: set(worker_pids(run_dir)) == {"trainer-0", "engine-2"})
        before = steps(run_dir)
        until("steps with it", lambda: steps(run_dir) >= before + 2)
        stdout = end(run, run_dir)
    finally:
        third.kill()
    assert rows(run_dir, "SELECT * FROM restarts") == []
    assert "engine-2 has joined" in stdout and "engine-0 has left" in stdout
    assert f'"{third.url}"' in (run_dir / "config.toml").read_text()

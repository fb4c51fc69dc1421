"""The gateway in a process of its own, in real runs: what clients do to it, and its death, do not stop training."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, start, worker_pids

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples/agent/agent.toml"
SMALL = (
    "run.name=run", "warm_start.steps=2", "warm_start.batch=8", "rollouts.group_size=2", "buffer.groups=2",
    "evaluate.prompts=4", "observe.display=plain", "task.timeout=60",
)  # fmt: skip
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Len"


def until(holds: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Wait until this holds, while the run lives."""
    deadline = time.monotonic() + 120
    while not (found := holds()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def steps(run_dir: Path) -> int:
    with contextlib.closing(sqlite3.connect(run_dir / "journal.db")) as db:
        try:
            return int(db.execute("SELECT count(*) FROM steps WHERE objective = 'policy'").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def told(run_dir: Path) -> dict[str, str]:
    """The address and the key, once the gateway listens."""
    try:
        return dict(json.loads((run_dir / "gateway.json").read_text()))
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def running(directory: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run of agents, with the usual limit of open files, that trains until it is interrupted."""
    settings = [*SMALL, f"run.directory={directory}", "run.versions=100000", *more]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        process = start("train", str(EXAMPLE), *(part for each in settings for part in ("--set", each)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        run_dir = directory / "run"
        until(lambda: told(run_dir) and steps(run_dir) >= 2, process)
        yield process, run_dir
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(100)
            except subprocess.TimeoutExpired:
                process.kill()


def goes_on(process: subprocess.Popen[str], run_dir: Path) -> None:
    before = steps(run_dir)
    until(lambda: steps(run_dir) >= before + 3, process)


def test_a_killed_gateway_is_started_again_at_its_address_and_the_run_goes_on(tmp_path: Path) -> None:
    with running(tmp_path) as (process, run_dir):
        before = told(run_dir)
        for _ in range(2):
            old = worker_pids(run_dir)["gateway-0"]
            os.kill(old, signal.SIGKILL)
            until(lambda old=old: worker_pids(run_dir).get("gateway-0", old) != old, process)
            goes_on(process, run_dir)
        assert told(run_dir) == before
        request = urllib.request.Request(
            f"{before['base_url']}/models", headers={"authorization": f"Bearer {before['api_key']}"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["data"]
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 130, stderr
    assert stdout.count("gateway-0 died: killed by signal 9; it is started again") == 2
    assert stdout.count("gateway-0 is back") == 2
    with sqlite3.connect(run_dir / "journal.db") as db:
        reasons = {reason for (reason,) in db.execute("SELECT reason FROM groups WHERE state = 'failed'")}
    assert reasons <= {"the gateway died (killed by signal 9)"}
    assert worker_pids(run_dir) == {}


def test_friction_28_idle_connections_do_not_stop_a_run(tmp_path: Path) -> None:
    with running(tmp_path) as (process, run_dir), contextlib.ExitStack() as open_:
        host, port = told(run_dir)["base_url"].removeprefix("http://").removesuffix("/v1").split(":")
        for _ in range(1100):
            one = open_.enter_context(socket.create_connection((host, int(port)), timeout=60))
            one.sendall(HALF)
        goes_on(process, run_dir)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 130, stderr
    assert "gateway-0 died" not in stdout


def test_friction_29_a_huge_message_is_refused_and_nobody_misses_a_heartbeat(tmp_path: Path) -> None:
    with running(tmp_path, "gateway.max_body=33554432") as (process, run_dir):
        where = told(run_dir)
        before = worker_pids(run_dir)
        for size, refused in ((10**7, 400), (4 * 10**7, 413)):
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a" * size}]}).encode()
            request = urllib.request.Request(
                f"{where['base_url']}/chat/completions", body, {"authorization": f"Bearer {where['api_key']}"}
            )
            with contextlib.suppress(
                ConnectionError, urllib.error.URLError
            ):  # The server reads no more of the large one.
                with pytest.raises(urllib.error.HTTPError) as caught:
                    urllib.request.urlopen(request, timeout=60)
                assert caught.value.code == refused
        goes_on(process, run_dir)
        assert worker_pids(run_dir) == before, "no process has been lost"
        peak = next(
            line for line in Path(f"/proc/{before['gateway-0']}/status").read_text().splitlines() if "VmRSS" in line
        )
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 130, stderr
    assert int(peak.split()[1]) < 1_500_000, peak

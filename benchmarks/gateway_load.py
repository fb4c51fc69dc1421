"""Measures what clients of the gateway cost a training run, and what the gateway costs the run's own agents.

    python benchmarks/gateway_load.py                        # on a machine that has nothing else to do
    python benchmarks/gateway_load.py --pairs 1 --versions 5 --idle 200 --bodies 5 --sessions 20

First, pairs of runs on two cores: one undisturbed, one whose gateway gets `--idle` connections that send half a header
and `--bodies` bodies of 32 MB, which are refused. The result is the median of consumed tokens per second of both, and
the median of their ratios. Then one run with `--sessions` agents at the same time: percentiles of a request's time,
and the peak memory of the gateway's process.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).parents[1]
DEADLINE = 3600
BODY_BYTES = 32 * 10**6
HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Len"
REFILL_SECONDS = 10.0
"""How often clients open new connections in the place of those that the gateway has closed."""
LATENCIES = "HEADRACE_BENCHMARK_LATENCIES"
"""This variable names the file to which agents write the seconds of each request."""
AGENT = f"""
import os, time
from functools import cache
from openai import OpenAI

@cache
def client(base_url):
    return OpenAI(base_url=base_url, api_key="-", max_retries=0)

def agent(base_url, api_key, model, messages):
    for _ in range(2):
        began = time.perf_counter()
        client(base_url).with_options(api_key=api_key).chat.completions.create(model=model, messages=messages)
        with open(os.environ["{LATENCIES}"], "a") as file:
            file.write(f"{{time.perf_counter() - began}}\\n")
    return 1.0
"""


class Load:
    """Clients that hold idle connections, and send bodies that are refused, until `stop`."""

    def __init__(self, where: dict[str, str], idle: int, bodies: int, seconds: float) -> None:
        """Start the clients. They spread the bodies over so many seconds."""
        host, port = where["base_url"].removeprefix("http://").removesuffix("/v1").rsplit(":", 1)
        self._address, self._key = (host, int(port)), where["api_key"]
        self._idle, self._bodies, self._pause = idle, bodies, seconds / max(1, bodies)
        self._stopping = threading.Event()
        self.opened = 0
        """The number of idle connections that were opened, those in the place of closed ones included."""
        self.refused = 0
        """The number of bodies that were refused."""
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._hold, self._send)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Close all connections."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _hold(self) -> None:
        """Hold the idle connections, and from time to time replace those that the gateway has closed."""
        held: list[socket.socket] = []
        while not self._stopping.is_set():
            held = [one for one in held if not _closed(one)]
            with contextlib.suppress(OSError):
                while len(held) < self._idle and not self._stopping.is_set():
                    held.append(socket.create_connection(self._address, timeout=10))
                    held[-1].sendall(HALF)
                    self.opened += 1
            self._stopping.wait(REFILL_SECONDS)
        for one in held:
            one.close()

    def _send(self) -> None:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._key}\r\n"
        body = b" " * BODY_BYTES
        while self.refused < self._bodies and not self._stopping.wait(self._pause):
            # The gateway stops reading and closes, so the client fails in the middle.
            with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=10) as one:
                one.sendall(f"{head}Content-Length: {BODY_BYTES}\r\n\r\n".encode())
                with contextlib.suppress(OSError):
                    one.sendall(body)
                self.refused += one.recv(64).startswith(b"HTTP/1.1 413")


def _closed(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        gone = one.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        gone = True
    one.close()
    return gone


def run(
    config: Path, settings: list[str], meanwhile: Callable[[Path, dict[str, str]], None] | None = None, **variables: str
) -> dict[str, Any]:
    """Run a configuration on two cores, and return its summary. `meanwhile` is called once the gateway listens."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        every = [*settings, f"run.directory={directory}", "run.name=run", "observe.display=none"]
        command = [sys.executable, "-m", "headrace", "train", str(config)]
        command += [part for setting in every for part in ("--set", setting)]
        cores = sorted(os.sched_getaffinity(0))[:2]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **variables}, preexec_fn=lambda: os.sched_setaffinity(0, cores)
        )
        try:
            while meanwhile is not None and process.poll() is None:
                with contextlib.suppress(OSError, ValueError):
                    meanwhile(run_dir, json.loads((run_dir / "gateway.json").read_text()))
                    break
                time.sleep(0.05)
            if process.wait(DEADLINE):
                raise SystemExit(f"the run ended with exit code {process.returncode}")
        finally:
            process.kill()
        return dict(json.loads((run_dir / "summary.json").read_text()))


def disturbed(pairs: int, versions: int, idle: int, bodies: int) -> dict[str, Any]:
    """Compare runs with and without clients that only disturb, in turns."""
    settings = [f"run.versions={versions}", "gateway.serve=true", "evaluate.prompts=0"]
    settings += ["evaluate.every=0", "warm_start.steps=10"]
    config = ROOT / "examples/quickstart/quickstart.toml"
    found: dict[str, list[float]] = {"alone": [], "disturbed": []}
    seconds = 60.0
    for _ in range(pairs):
        alone = run(config, settings)
        found["alone"].append(alone["tokens_per_second"])
        seconds = alone["train_seconds"]
        loads: list[Load] = []

        def meanwhile(run_dir: Path, where: dict[str, str], loads: list[Load] = loads, limit: float = seconds) -> None:
            # They must have sent everything before the run ends.
            loads.append(Load(where, idle, bodies, 0.7 * limit))

        found["disturbed"].append(run(config, settings, meanwhile)["tokens_per_second"])
        for load in loads:
            load.stop()
            print(f"{load.opened:,} idle connections opened, {load.refused} bodies refused", file=sys.stderr)
    ratios = [with_ / without for with_, without in zip(found["disturbed"], found["alone"], strict=True)]
    return {
        "tokens_per_second": median(found["alone"]),
        "tokens_per_second_disturbed": median(found["disturbed"]),
        "ratio": median(ratios),
        "ratios": ratios,
    }


def own_agents(sessions: int, versions: int) -> dict[str, Any]:
    """Run this many agents at the same time, and measure their requests and the gateway's memory."""
    with tempfile.TemporaryDirectory() as directory:
        agent, times = Path(directory) / "agent.py", Path(directory) / "latencies"
        agent.write_text(AGENT)
        group = 10 if sessions % 10 == 0 else 2
        settings = [
            f"run.versions={versions}",
            f"task.agent={agent}:agent",
            f"task.concurrency={sessions}",
            f"rollouts.group_size={group}",
            f"buffer.groups={max(1, sessions // group // 2)}",
            "warm_start.steps=2",
            "evaluate.prompts=0",
            "engine.slots=128",
            "engine.max_length=64",
        ]
        peak = [0]

        def watch(run_dir: Path, where: dict[str, str]) -> None:
            def look() -> None:
                while (memory := _gateway_memory(run_dir)) is not None:
                    peak[0] = max(peak[0], memory)
                    time.sleep(0.1)

            threading.Thread(target=look, daemon=True).start()

        summary = run(ROOT / "examples/agent/agent.toml", settings, watch, **{LATENCIES: str(times)})
        seconds = sorted(float(line) for line in times.read_text().split())
    cuts = quantiles(seconds, n=100)
    return {
        "sessions": sessions,
        "requests": len(seconds),
        "milliseconds": {f"p{p}": round(1000 * cuts[p - 1], 1) for p in (50, 90, 99)},
        "gateway_peak_mb": round(peak[0] / 1000),
        "tokens_per_second": summary["tokens_per_second"],
    }


def _gateway_memory(run_dir: Path) -> int | None:
    """Return the memory of a run's gateway in kB, without what it shares with its fork server; None if it ended."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"gateway" in command and b"--role" in command and str(run_dir).encode() in command:
                words = [line.split() for line in (process / "smaps_rollup").read_text().splitlines()]
                return sum(int(word[1]) for word in words if word[0].startswith("Private_"))
    return None


def main() -> None:
    """Measure, and print the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--versions", type=int, default=120, help="of each run of a pair")
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--bodies", type=int, default=50)
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--agent-versions", type=int, default=10, help="of the run of agents")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.pairs:
        found["clients"] = disturbed(options.pairs, options.versions, options.idle, options.bodies)
    if options.sessions:
        found["agents"] = own_agents(options.sessions, options.agent_versions)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

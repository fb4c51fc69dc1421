"""A run as a shell starts it, with a hand that kills and stops its processes, and a look at what it left."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from headrace.cluster.launchers.local import SHARED

ROOT = Path(__file__).parents[1]
MARK = "HEADRACE_ATTACKED"
"""Every process of an attacked run has this variable in its environment, whoever started it."""
MODULES = {
    "headrace.scoring.worker_main": "reward",
    "headrace.gateway.agent_main": "agent",
    "headrace.cluster.launchers.fork_server": "fork server",
}
RANK_DIED = re.compile(r"trainer-\d+ died")
STEPS = "SELECT count(*) FROM steps WHERE objective = 'policy'"
SAVING = "checkpoints/.partial*"
DELIVERING = (
    "SELECT (SELECT count(*) FROM versions) > (SELECT count(DISTINCT version) FROM deliveries) AND "
    "(SELECT count(*) FROM steps WHERE objective = 'policy') > 0"
)
FINISHED = "SELECT count(*) FROM meta WHERE key = 'outcome' AND value LIKE '%finished%'"
MOMENT_SECONDS, END_SECONDS = 5.0, 60.0
BACK_SECONDS = 60.0


class Victim:
    """One run, which is resumed by the hand where only a user's command can do it."""

    def __init__(self, file: Path, directory: Path, *settings: str, versions: int, seconds: float) -> None:
        self.run_dir = directory / "run"
        self.versions = versions
        self.killed: Counter[str] = Counter()
        self.resumed = 0
        self._judged = 0
        """How much of the log is of earlier commands."""
        self._log = directory / "run.log"
        self._deadline = time.monotonic() + seconds
        self._sockets = directory / "tmp"
        self._sockets.mkdir()
        self._mark = f"{MARK}={directory}"
        self._environment = {key: value for key, value in os.environ.items() if key != SHARED}
        self._environment |= {MARK: str(directory), "TMPDIR": str(self._sockets)}
        # The name is that of shared memory too, and tells this run's from others'.
        self.name = f"attacked-{os.getpid()}-{directory.parent.name}-{directory.name}"
        chosen = (*settings, f"run.directory={directory}", f"run.name={self.name}", f"run.versions={versions}")
        self.run_dir = directory / self.name
        self.controller = self._start("train", str(file), *set_all(*chosen))

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "headrace", *arguments]
            return subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def steps(self) -> int:
        """Return how many policy steps the journal has."""
        return count(self.run_dir, STEPS)

    def processes(self) -> dict[str, list[int]]:
        """Return the live processes beside the controller, by what they are."""
        found: dict[str, list[int]] = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark.encode() not in (process / "environ").read_bytes().split(b"\0"):
                    continue
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                running = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except (OSError, IndexError):
                continue
            if running and int(process.name) != self.controller.pid:
                found.setdefault(_name(words), []).append(int(process.name))
        return found

    def kill(self, name: str, random: Random) -> bool:
        """Kill -9 a process of this name; the controller is resumed. Return whether there was one in time."""
        if name == "controller":
            if not self._kill_controller():
                return False
        else:
            # A process that was killed a moment ago comes back first.
            if not self._wait(lambda: name in self.processes() or not self.alive(), BACK_SECONDS):
                return False
            try:
                os.kill(random.choice(self.processes()[name]), signal.SIGKILL)
            except (KeyError, ProcessLookupError):
                return False
        self.killed[name] += 1
        return True

    def stop(self, name: str, random: Random, seconds: float) -> bool:
        """Let a process of this name stand still for so many seconds. Return whether there was one."""
        try:
            pid = random.choice(self.processes()[name])
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
        except (KeyError, ProcessLookupError):
            return False
        return True

    def _kill_controller(self) -> bool:
        self.controller.kill()
        if self.controller.wait() != -signal.SIGKILL:
            return False  # The run had ended by itself.
        self._wait(lambda: not self.processes(), END_SECONDS)
        if count(self.run_dir, FINISHED):
            # A finished run is not resumed. What it had not written yet is written from its journal.
            self.controller = self._start("report", str(self.run_dir))
        else:
            self._resume()
        return True

    def _resume(self) -> None:
        self.resumed += 1
        self._judged = len(self.said(1 << 20))
        self.controller = self._start("resume", str(self.run_dir))

    def alive(self) -> bool:
        """Return whether the run goes on. A run that ended because a trainer rank died is resumed."""
        if time.monotonic() > self._deadline:
            return False
        if self.controller.poll() is None:
            return True
        if self.controller.returncode == 1 and RANK_DIED.search(self.said(1 << 20)[self._judged :]):
            self._resume()
            return True
        return False

    def wait_for_step(self, step: int) -> bool:
        """Wait until the journal has this many steps. Return False if the run ended or took too long."""
        while self.steps() < step:
            if not self.alive():
                return False
            time.sleep(0.05)
        return self.alive()

    def wait_for_moment(self, moment: str) -> None:
        """Wait a while for a checkpoint that is being written, or a version that is being delivered."""
        if moment == "checkpoint":
            self._wait(lambda: any(self.run_dir.glob(SAVING)), MOMENT_SECONDS)
        elif moment == "delivery":
            self._wait(lambda: bool(count(self.run_dir, DELIVERING)), MOMENT_SECONDS)

    def _wait(self, holds: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True

    def ledger(self) -> dict[str, Any]:
        """Return what `headrace ledger` says."""
        command = [sys.executable, "-m", "headrace", "ledger", str(self.run_dir), "--json"]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, check=False, timeout=END_SECONDS)
        found: dict[str, Any] = json.loads(done.stdout or b"{}")
        return found

    def summary(self) -> dict[str, Any]:
        """Return the run's summary."""
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found

    def problem(self) -> str | None:
        """Wait for the end of the run. Return what is wrong with what it left, or None."""
        while self.alive():
            time.sleep(0.05)
        if self.controller.poll() is None:
            return f"not over in time: {self.said()}"
        if self.controller.returncode:
            return f"exit code {self.controller.returncode}: {self.said()}"
        if "Traceback" in self.said(1 << 20):
            return f"a traceback: {self.said(1 << 20).partition('Traceback')[2][:500]}"
        ledger = self.ledger()
        self._wait(lambda: not self.processes(), MOMENT_SECONDS)
        wrong = {
            f"the ledgers do not balance: {ledger.get('problems')}": not ledger.get("balanced"),
            "groups are in flight after the end": bool(ledger.get("groups", {}).get("in_flight")),
            "a step is missing": self.steps() != self.versions,
            "a step trained other than its groups": count(
                self.run_dir,
                "SELECT count(*) FROM (SELECT s.step FROM steps s LEFT JOIN groups g ON g.step = s.step AND g.state = "
                "'trained' WHERE s.objective = 'policy' GROUP BY s.step HAVING count(g.id) != max(s.groups))",
            ),
            "one step has two digests": count(
                self.run_dir,
                "SELECT count(*) FROM (SELECT step FROM versions GROUP BY step HAVING count(DISTINCT digest) > 1)",
            ),
            f"processes stay: {self.processes()}": bool(self.processes()),
            "shared memory stays": any(Path("/dev/shm").glob(f"*{self.name}*")),
            f"sockets stay: {[path.name for path in self._sockets.glob('headrace-*')]}": any(
                self._sockets.glob("headrace-*")
            ),
            "a checkpoint is half written": any(self.run_dir.glob(SAVING)),
        }
        return "; ".join(problem for problem, is_so in wrong.items() if is_so) or None

    def end(self) -> None:
        """End the run and all its processes, whatever they do."""
        self.controller.kill()
        self.controller.wait()
        for pids in self.processes().values():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def said(self, last: int = 600) -> str:
        """Return the end of what the run has printed."""
        return self._log.read_text(errors="replace")[-last:]


def _name(words: list[str]) -> str:
    if "headrace.cluster.worker_main" in words:
        return f"{words[words.index('--role') + 1]}-{words[words.index('--rank') + 1]}"
    return next((name for module, name in MODULES.items() if module in words), "other")


def count(run_dir: Path, sql: str) -> int:
    """Return the one number that a query of a run's journal gives; 0 while there is none."""
    try:
        with sqlite3.connect(f"file:{run_dir / 'journal.db'}?mode=ro", uri=True, timeout=10) as journal:
            return int(journal.execute(sql).fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def set_all(*settings: str) -> list[str]:
    """Return the arguments of a command for these settings."""
    return [word for setting in settings for word in ("--set", setting)]

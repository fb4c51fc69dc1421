"""Kills and stops of the processes of a run at random moments. The run must end as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from mutations import Case
from targets import QUICKSTART, ROOT, Targets

AGENT = ROOT / "examples/agent/agent.toml"
VERSIONS = 30
COMMON = (
    f"run.versions={VERSIONS}", "training.checkpoint_every=3", "pipeline.restarts=50", "observe.display=plain",
    "evaluate.every=0", "evaluate.prompts=16", "warm_start.steps=5",
)  # fmt: skip
CONFIGURATIONS: dict[str, tuple[Path, tuple[str, ...]]] = {
    "plain": (QUICKSTART, ()),
    "agents": (AGENT, ("delivery.transport=tcp", "delivery.send=delta")),
    "ranks": (QUICKSTART, ("training.ranks=2", "engine.count=2", "delivery.transport=file")),
}
ROLES = {
    "headrace.cluster.worker_main": "worker",
    "headrace.scoring.worker_main": "reward",
    "headrace.gateway.agent_main": "agent",
}
KILLS = 4
"""Attacks on one run. Several may come at once."""
RUN_SECONDS, STOP_SECONDS = 600.0, 3.0


class Victim:
    """A run as a shell starts it, and a hand that kills and stops its processes."""

    def __init__(self, name: str, directory: Path) -> None:
        file, settings = CONFIGURATIONS[name]
        self.run_dir = directory / name
        self._log = directory / f"{name}.log"
        chosen = [*COMMON, *settings, f"run.directory={directory}", f"run.name={name}"]
        self._deadline = time.monotonic() + RUN_SECONDS
        self.controller = self._start("train", str(file), *(word for each in chosen for word in ("--set", each)))

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "headrace", *arguments]
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def processes(self) -> dict[str, list[int]]:
        """Return the live processes beside the controller, by what they are."""
        found: dict[str, list[int]] = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                own = str(self.run_dir) in words or int(_field(process, 1)) == self.controller.pid
                running = _field(process, 0) != "Z"
            except (OSError, IndexError):
                continue
            for module, role in ROLES.items():
                if module in words and own and running:
                    name = words[words.index("--role") + 1] if role == "worker" else role
                    found.setdefault(name, []).append(int(process.name))
        return found

    def attack(self, random: Random) -> str:
        """Kill or stop one process, the controller included. Return what was done."""
        found = self.processes()
        kind = random.choice([*sorted(found), "controller"])
        if kind == "controller":
            self.controller.kill()
            self.controller.wait()
            while self.processes():
                if time.monotonic() > self._deadline:
                    return "the controller killed, and its processes stay"
                time.sleep(0.05)
            self.controller = self._start("resume", str(self.run_dir))
            return "the controller killed and resumed"
        pid = random.choice(found[kind])
        try:
            if random.random() < 0.8:
                os.kill(pid, signal.SIGKILL)
                return f"{kind} killed"
            os.kill(pid, signal.SIGSTOP)
            time.sleep(random.random() * STOP_SECONDS)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return f"{kind} had ended"
        return f"{kind} stopped for a while"

    def wait_for_step(self, step: int) -> bool:
        """Wait until the journal has this many steps. Return False if the run ended or took too long."""
        while self.controller.poll() is None and time.monotonic() < self._deadline:
            if self._count("SELECT count(*) FROM steps WHERE objective = 'policy'") >= step:
                return True
            time.sleep(0.05)
        return False

    def problem(self) -> str | None:
        """Wait for the end of the run. Return what is wrong with what it left, or None."""
        try:
            code = self.controller.wait(max(1.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.controller.kill()
            return f"not over after {RUN_SECONDS:g} s: {self._said()}"
        if code:
            return f"exit code {code}: {self._said()}"
        if "Traceback" in self._said(1 << 20):
            return f"a traceback: {self._said(1 << 20).partition('Traceback')[2][:500]}"
        command = [sys.executable, "-m", "headrace", "ledger", str(self.run_dir), "--json"]
        ledger = json.loads(subprocess.run(command, capture_output=True, cwd=ROOT, check=False).stdout or "{}")
        sampled = sum(ledger.get("sampled_tokens", {}).values())
        wrong = {
            f"the ledgers do not balance: {ledger.get('problems')}": not ledger.get("balanced"),
            f"{ledger.get('regenerated_tokens')} of {sampled} tokens sampled again": (
                ledger.get("regenerated_tokens", 0) > max(0.02 * sampled, 2000)
            ),
            "a step is missing": self._count("SELECT count(*) FROM steps WHERE objective = 'policy'") != VERSIONS,
            "a step trained other than its groups": self._count(
                "SELECT count(*) FROM (SELECT s.step FROM steps s LEFT JOIN groups g ON g.step = s.step AND g.state = "
                "'trained' WHERE s.objective = 'policy' GROUP BY s.step HAVING count(g.id) != max(s.groups))"
            ),
            "one step has two digests": self._count(
                "SELECT count(*) FROM (SELECT step FROM versions GROUP BY step HAVING count(DISTINCT digest) > 1)"
            ),
            f"processes stay: {self.processes()}": bool(self.processes()),
            "a segment of shared memory stays": any(
                self.run_dir.name in path.name for path in Path("/dev/shm").glob("headrace-*")
            ),
        }
        return "; ".join(problem for problem, is_so in wrong.items() if is_so) or None

    def end(self) -> None:
        """End the run, whatever it does."""
        self.controller.kill()
        self.controller.wait()

    def _count(self, sql: str) -> int:
        try:
            with sqlite3.connect(f"file:{self.run_dir / 'journal.db'}?mode=ro", uri=True, timeout=10) as journal:
                return int(journal.execute(sql).fetchone()[0])
        except sqlite3.OperationalError:
            return 0

    def _said(self, last: int = 600) -> str:
        return self._log.read_text(errors="replace")[-last:]


def _field(process: Path, number: int) -> str:
    """Return a field of /proc/PID/stat after the name: 0 is the state, 1 the parent."""
    return (process / "stat").read_text().rpartition(")")[2].split()[number]


def attack_processes(random: Random, targets: Targets) -> Case:
    """Run one configuration and attack its processes, then look at what is left."""
    name = random.choice(list(CONFIGURATIONS))
    directory = targets.directory / f"attacked-{random.getrandbits(32):08x}"
    directory.mkdir()
    victim = Victim(name, directory)
    done = []
    try:
        moments = sorted(random.sample(range(VERSIONS - 2), KILLS))
        for moment in moments:
            if not victim.wait_for_step(moment):
                break
            time.sleep(random.random() * 0.5)
            done += [f"step {moment}: {victim.attack(random)}" for _ in range(random.choice((1, 1, 2)))]
        return Case(f"{name}: {', '.join(done)}", victim.problem(), f"exit {victim.controller.returncode}")
    finally:
        victim.end()


KINDS = {"processes": attack_processes}

"""A small real run under Ray, on two hosts, for strangers on a third one: `with attacked_run() as run`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import socket
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from hosts import ROOT, Host, Hosts
from ray_cluster import RayCluster
from search import Place, forms, in_directory, on_hosts, search

sys.path.append(str(ROOT / "tests/integration"))

from runs import NAME, QUICKSTART, small_settings

from waiting import until

SECONDS = 240.0
OPEN_FILES = 1024
"""How many files a process may have open on most systems. A run must bear strangers with this limit."""
STEPS = 3
LISTENS = "0A"
GONE = "strangers-have-gone"
# Loaded by every Python on all hosts. It writes down the pairs of keys that processes of the run make. All secret keys
# begin with the same mark, so that one search finds every one of them. The mark stands here backwards.
SPY = """
import os, sys

if any(word.startswith("headrace") for word in sys.orig_argv):
    import zmq
    from zmq.utils import z85

    def made():
        secret = z85.encode(bytes.fromhex({mark!r})[::-1] + os.urandom(24))
        pair = zmq.curve_public(secret), secret
        with open({file!r}, "ab", buffering=0) as file:
            file.write(b" ".join(pair) + (b" worker\\n" if "--role" in sys.orig_argv else b" controller\\n"))
        return pair

    zmq.curve_keypair = made
"""
# A reward that takes more and more time while strangers are there: the run must not end before they do.
REWARD = """
import itertools, pathlib, time

calls = itertools.count()

def reward(completion, answer):
    pause = 0.01 * 2 ** (next(calls) / 500)
    time.sleep(0 if pathlib.Path({file!r}).exists() else pause)
    return float(completion == answer)
"""


@dataclass
class Run:
    """A run of a trainer, two engines and a gateway on two hosts. The stranger has a third one."""

    hosts: list[Host]
    stranger: Host
    shared: Path
    process: subprocess.Popen[str]
    recorder: subprocess.Popen[str]
    mark: bytes
    """All secret keys of the run begin with these bytes."""

    @property
    def path(self) -> Path:
        return self.shared / NAME

    def ask(self, question: str) -> list[Any]:
        """Return the journal's answer; nothing while there is no journal."""
        try:
            with contextlib.closing(sqlite3.connect(f"file:{self.path / 'journal.db'}?mode=ro", uri=True)) as db:
                return db.execute(question).fetchall()
        except sqlite3.OperationalError:
            return []

    def steps(self) -> int:
        return sum(number for (number,) in self.ask("SELECT count(*) FROM steps WHERE objective = 'policy'"))

    def goes_on(self) -> None:
        """Wait until some more steps are trained. Nothing may have been restarted meanwhile."""
        wanted = self.steps() + STEPS
        wait_for(lambda: self.steps() >= wanted or self.process.poll() is not None)
        assert self.process.poll() is None, self.process.communicate()[1]
        assert self.ask("SELECT process, reason FROM restarts") == []

    def end(self) -> tuple[str, str]:
        """Let the run come to its end at full speed. Return what it printed."""
        (self.shared / GONE).touch()
        said: tuple[str, str] = self.process.communicate(timeout=SECONDS)
        return said

    def pairs(self, maker: str) -> dict[str, str]:
        """Return the pairs of keys that the controller or the workers have made: public -> secret."""
        rows = [line.split() for line in (self.shared / "pairs").read_text().splitlines()]
        return {public: secret for public, secret, made_by in rows if made_by == maker}

    @contextlib.contextmanager
    def stranger_does(self, tasks: list[dict[str, Any]]) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, str(Path(__file__).with_name("stranger.py"))]
        with self.stranger.start(command, stdin=PIPE, stdout=PIPE, text=True) as process:
            process.stdin.write(json.dumps(tasks) + "\n")
            process.stdin.flush()
            yield process

    def stranger_gets(self, tasks: list[dict[str, Any]]) -> list[Any]:
        with self.stranger_does(tasks) as process:
            return json.loads(process.communicate(timeout=SECONDS)[0])

    def search(self, **texts: str) -> dict[str, set[Place]]:
        """Search for these texts, and for secret keys."""
        wanted = {"secret keys": forms(self.mark), **{name: {text.encode()} for name, text in texts.items()}}
        places = on_hosts(self.hosts, is_rays=lambda words: not is_ours(words))
        return search(wanted, [*places, *in_directory(self.path, "run")])


def wait_for(holds: Callable[[], object]) -> None:
    asyncio.run(until(holds, SECONDS))


@contextlib.contextmanager
def attacked_run() -> Iterator[Run]:
    """A run that trains. It has a limit of open files as most systems have it, and secret keys that can be found."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    (ROOT / ".cache").mkdir(exist_ok=True)
    with contextlib.ExitStack() as ends:
        shared = Path(ends.enter_context(tempfile.TemporaryDirectory(dir=ROOT / ".cache", prefix="strangers-")))
        (shared / "spy").mkdir()
        mark = secrets.token_bytes(8)
        (shared / "spy/sitecustomize.py").write_text(SPY.format(file=str(shared / "pairs"), mark=mark[::-1].hex()))
        (shared / "reward.py").write_text(REWARD.format(file=str(shared / GONE)))
        patch = ends.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PYTHONPATH", str(shared / "spy"), prepend=os.pathsep)
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, limits[1]))
        ends.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        *hosts, stranger = ends.enter_context(Hosts(3))
        cluster = ends.enter_context(RayCluster(hosts))
        cluster.ready(SECONDS)
        command = [sys.executable, str(Path(__file__).with_name("recorder.py")), hosts[1].address]
        recorder = hosts[0].start(command, stdin=PIPE, stdout=PIPE, text=True)
        assert recorder.stdout.readline() == "recording\n"
        settings = small_settings(
            shared,
            "run.versions=130",
            "pipeline.launcher=ray",
            "engine.count=2",
            "delivery.transport=tcp",
            "training.checkpoint_every=4",
            "gateway.serve=true",
            f"gateway.bind={hosts[0].address}",
            f"task.reward={shared}/reward.py:reward",
        )
        sets = [word for setting in settings for word in ("--set", setting)]
        process = hosts[0].start(
            [sys.executable, "-m", "headrace", "train", str(QUICKSTART), *sets],
            {"RAY_ADDRESS": cluster.address},
            stdout=PIPE,
            stderr=PIPE,
            text=True,
        )
        made = Run(hosts, stranger, shared, process, recorder, mark)
        wait_for(lambda: made.steps() >= STEPS or process.poll() is not None)
        made.goes_on()
        yield made


def is_ours(words: list[str]) -> bool:
    """Whether this is a process of the run. The driver is a process of Ray's cluster, and its ports are Ray's."""
    return any(word.startswith("headrace") for word in words) and not any("ray_driver" in word for word in words)


def listeners(hosts: Sequence[Host]) -> list[tuple[str, str]]:
    """Return the ports on which processes of the run listen: what listens, and its address."""
    found = []
    for host in hosts:
        for pid, words in host.processes().items():
            if not is_ours(words):
                continue
            role = words[words.index("--role") + 1] if "--role" in words else "controller"
            process = Path(f"/proc/{pid}")
            files = {str(file.readlink()) for file in (process / "fd").iterdir()}
            for table in ("tcp", "tcp6"):
                for row in map(str.split, (process / "net" / table).read_text().splitlines()[1:]):
                    if row[3] == LISTENS and f"socket:[{row[9]}]" in files:
                        address, port = row[1].split(":")
                        if table == "tcp":
                            address = socket.inet_ntoa(struct.pack("=I", int(address, 16)))
                        found.append((role, f"{address}:{int(port, 16)}"))
    return sorted(found)

"""A stand-in for Slurm on hosts: `with Slurm(hosts, directory) as slurm`, then `slurm.batch(script)`.

It has the programs `srun` and `scontrol`, as far as the sbatch script of `headrace launch` uses them. A batch script
runs on the first host. From there, `srun` asks this process for a job step on a host, by a socket in a directory that
all hosts see. As Slurm's does, it hands its output to the step, passes signals on, and ends with the step's exit code.
Slurm would kill what a script leaves behind. The stand-in does not, so a test can see it.
"""

from __future__ import annotations

import json
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import Any

from hosts import Host

JOB_ID = 4711
SRUN = """#!PYTHON -ES
import json, os, signal, socket, sys

KNOWN = {"--overlap", "--nodes", "--ntasks", "--cpu-bind", "--nodelist"}
words, options = sys.argv[1:], {}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
if not options.keys() <= KNOWN:
    sys.exit(f"srun: {sorted(options.keys() - KNOWN)}")
step = {"node": options["--nodelist"], "command": words, "env": dict(os.environ), "cwd": os.getcwd()}
content = json.dumps(step).encode()
link = socket.socket(socket.AF_UNIX)
link.connect("SOCKET")
socket.send_fds(link, [len(content).to_bytes(8, "big")], [1, 2])
link.sendall(content)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: link.sendall(bytes([number])))
code = link.recv(1)
sys.exit(code[0] if code else 137)
"""
SCONTROL = """#!/bin/bash
case "$*" in
    "show hostnames host[1-3]") printf '%s\\n' host1 host2 host3 ;;
    *) echo "$@" >> DIRECTORY/scontrol.txt ;;
esac
"""


class Slurm:
    """Slurm on these hosts, from `__enter__` to `__exit__`."""

    def __init__(self, hosts: Sequence[Host], directory: Path) -> None:
        """Put the programs into a directory that all hosts see."""
        self._hosts = {host.name: host for host in hosts}
        self._first = hosts[0]
        self._directory = directory
        self._listening = socket.socket(socket.AF_UNIX)
        texts = {"PYTHON": sys.executable, "SOCKET": str(directory / "slurm.socket"), "DIRECTORY": str(directory)}
        for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
            for word, text in texts.items():
                script = script.replace(word, text)
            (directory / name).write_text(script)
            (directory / name).chmod(stat.S_IRWXU)

    def __enter__(self) -> Slurm:
        """Take requests for job steps."""
        self._listening.bind(str(self._directory / "slurm.socket"))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Take no more requests."""
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def batch(self, script: Path, output: Path, env: Mapping[str, str]) -> subprocess.Popen[Any]:
        """Start a script as the batch script of a job on all hosts."""
        job = {"SLURM_JOB_ID": str(JOB_ID), "SLURM_JOB_NODELIST": "host[1-3]", "SLURM_CPUS_ON_NODE": "2"}
        path = {"PATH": f"{self._directory}:/usr/sbin:/usr/bin:/sbin:/bin"}
        with output.open("wb") as file:
            return self._first.start(["bash", str(script)], env={**env, **job, **path}, stdout=file, stderr=STDOUT)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except OSError:  # It was closed.
                return
            threading.Thread(target=self._step, args=(link,), daemon=True).start()

    def _step(self, link: socket.socket) -> None:
        with link:
            length, (out, err), *_ = socket.recv_fds(link, 8, 2)
            with link.makefile("rb") as stream, open(out, "wb") as output, open(err, "wb") as errors:  # noqa: PTH123
                step = json.loads(stream.read(int.from_bytes(length, "big")))
                process = self._hosts[step["node"]].start(
                    step["command"], step["env"], step["cwd"], stdin=DEVNULL, stdout=output, stderr=errors
                )
            threading.Thread(target=self._pass_signals, args=(link, process), daemon=True).start()
            code = process.wait()
            link.sendall(bytes([code if code >= 0 else 128 - code]))
            link.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _pass_signals(link: socket.socket, process: subprocess.Popen[Any]) -> None:
        while number := link.recv(1):
            process.send_signal(number[0])
        process.kill()  # The step has ended, or its srun has.

"""A fork server for commands: each command begins in a process that has already loaded torch and transformers.

    a line on stdin (JSON: arguments, directory, environment, files for the output) -> two lines on stdout, one when the
    command begins (its process id) and one when it has ended (its exit code)

Loading takes longer than most commands of the tests. The server computes nothing itself and has one thread, so a fork
of it behaves like a new process. A fork may also run several commands, one after the other: the attack suite tries
thousands that take less time than a fork. A command that ends its process ends only its fork.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

ANSWERED = 77
"""The exit code of a fork that has answered all its commands."""


class CommandServer:
    """The test's end of the server, which runs one command at a time, and so many in each fork."""

    def __init__(self, each_fork: int = 1) -> None:
        command = [sys.executable, __file__, str(each_fork)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, arguments: tuple[str, ...], timeout: float, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run `python -m headrace` with these arguments and the environment that the test has now."""
        with tempfile.TemporaryDirectory() as directory:
            out, err = Path(directory) / "stdout", Path(directory) / "stderr"
            self._send(
                arguments=arguments, cwd=str(cwd), environment=dict(os.environ), stdout=str(out), stderr=str(err)
            )
            pid = self._receive()
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                os.killpg(pid, signal.SIGKILL)
                self._receive()
                raise subprocess.TimeoutExpired(arguments, timeout, out.read_bytes(), err.read_bytes())
            code = self._receive()
            said = [path.read_text(errors="replace") for path in (out, err)]
            return subprocess.CompletedProcess(arguments, code, *said)

    def close(self) -> None:
        """End the server. No command runs now: `run` waits for each."""
        self._process.kill()
        self._process.communicate()

    def _send(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        self._process.stdin.flush()

    def _receive(self) -> int:
        assert self._process.stdout is not None
        # Byte by byte, so that no line waits in a buffer where `select` does not see it.
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._process.stdout.fileno(), 1)
            assert byte, f"the server of commands has ended with {self._process.wait()}"
            line += byte
        return int(line)


def run_command(command: dict[str, Any]) -> int:
    """Run a command in this process. Return its exit code."""
    for descriptor, path in enumerate((os.devnull, command["stdout"], command["stderr"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["environment"])
    sys.path[0] = command["cwd"]
    sys.argv[1:] = command["arguments"]
    code = 0
    try:
        runpy.run_module("headrace", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # noqa: BLE001  (as the interpreter ends)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def serve_commands(line: str, each_fork: int) -> NoReturn:
    """Run this command and those that follow it, in a fork of the server."""
    os.setsid()
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.dup(1)
    for number in range(each_fork):
        if number and not (line := requests.readline().decode()):
            break
        os.write(answers, f"{os.getpid()}\n".encode())
        code = run_command(json.loads(line))
        if number + 1 == each_fork:
            # The interpreter's own end would take every loaded module apart, for longer than most commands take.
            atexit._run_exitfuncs()
        os.write(answers, f"{code}\n".encode())
    os._exit(ANSWERED)


def main() -> None:
    """Load, then serve until the test closes its end."""
    import pydantic  # noqa: F401  (typer loads it with the first command)

    import headrace.cli.main
    import headrace.engines.embedded.building
    import headrace.pipeline.replay
    import headrace.pipeline.waits
    import headrace.training.serving  # noqa: F401

    # The collector of a fork, also the one that runs at its end, needs not look at what is loaded.
    gc.collect()
    gc.freeze()
    each_fork = int(sys.argv[1])
    requests = os.fdopen(0, "rb", buffering=0, closefd=False)
    while line := requests.readline().decode():
        pid = os.fork()
        if pid == 0:
            serve_commands(line, each_fork)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != ANSWERED:  # A command ended its process.
            os.write(1, f"{code}\n".encode())


if __name__ == "__main__":
    main()

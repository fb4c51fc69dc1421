"""The fork server, from which workers are forked: `python -m headrace.cluster.launchers.fork_server ROOM`.

The fork server has loaded the libraries that every worker needs, which takes seconds, and computes nothing itself. It
has one thread, no device and no open state, so a fork of it is as good as a new process. Its standard input is a socket
to the launcher, which asks for workers and is told how they ended. The workers are killed when the connection ends. The
fork server ends with its connection and with its parent.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from headrace.channel.worker_side import die_with_parent
from headrace.cluster.worker_main import leave
from headrace.cluster.worker_main import main as work

ROOM = 1024
"""Spare bytes in the fork server's command line. A worker's command line must fit into them to be shown by `ps`."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to fork a worker."""

    name: str
    arguments: list[str]
    environment: dict[str, str]
    directory: str
    log: str


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request to kill this worker and its whole process group, if it still runs."""

    name: str


class WorkerEnded(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended: its exit code, or the negative number of the signal that killed it."""

    name: str
    code: int


class ForkServer:
    """The server of one launcher, until the launcher closes the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._line = b""
        self._workers: dict[int, str] = {}
        self._deaths, self._signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._requests: msgspec.json.Decoder[Start | Kill] = msgspec.json.Decoder(Start | Kill)

    def serve(self) -> NoReturn:
        """Fork, kill and report workers. Ends this process when the connection ends."""
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        connection = self._connection.fileno()
        while True:
            ready, _, _ = select.select([self._deaths, connection], [], [])
            if self._deaths in ready:
                self._reap()
            if connection in ready:
                self._hear()

    def _hear(self) -> None:
        try:
            received = self._connection.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            self._kill(None)
            leave(0)
        *lines, self._line = (self._line + received).split(b"\n")
        for line in lines:
            match self._requests.decode(line):
                case Start() as start:
                    pid = os.fork()
                    if pid == 0:
                        self._become(start)
                    self._workers[pid] = start.name
                case Kill(name=name):
                    self._kill(name)

    def _kill(self, name: str | None) -> None:
        for pid, own in self._workers.items():
            if name in (None, own):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def _become(self, start: Start) -> NoReturn:
        """Run a worker in the forked process. Nothing of the fork server stays open or continues there."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._connection.close()
            os.close(self._deaths)
            os.close(self._signalled)
            os.setsid()
            os.chdir(start.directory)
            _redirect(start.log)
            os.environ.clear()
            os.environ.update(start.environment)
            sys.argv = ["headrace.cluster.worker_main", *start.arguments]
            _show_as([sys.executable, "-m", *sys.argv])
            code = work(start.arguments)
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            # Whatever happened, no exception may unwind into the fork server's loop.
            leave(code)

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._deaths, 1 << 12)
        # Without children, `waitpid` raises `ChildProcessError`.
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if pid not in self._workers:
                    continue  # Not a worker, but a process that a library started while it was loaded.
                message = WorkerEnded(name=self._workers.pop(pid), code=os.waitstatus_to_exitcode(status))
                with contextlib.suppress(OSError):  # The launcher is gone, so nobody needs this message.
                    self._connection.sendall(msgspec.json.encode(message) + b"\n")


def _redirect(log: str) -> None:
    """Give the process an empty standard input, and send all its output to the log."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)


def _show_as(command: list[str]) -> None:
    """Make tools like `ps` show this command. Linux keeps a process's command line in the process's own memory."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join(command).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def load_libraries() -> None:
    """Load what every worker needs."""
    import headrace.engines.embedded.building
    import headrace.training.serving  # noqa: F401

    # The loaded objects stay alive, so the garbage collector need not visit them again in any fork.
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load_libraries()
    # A copy of descriptor 0, because that becomes the standard input of workers.
    ForkServer(socket.socket(fileno=os.dup(0))).serve()

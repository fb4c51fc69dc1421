"""The fork server, from which workers are forked: `python -m headrace.cluster.launchers.fork_server SOCKET ROOM`.

The fork server has loaded the libraries that every worker needs, which takes seconds, and computes nothing itself. It
has one thread, no device and no open state, so a fork of it is as good as a new process. Launchers connect to its
socket and ask for workers. Each launcher is told how its own workers ended, and its workers are killed when its
connection ends. The fork server ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from functools import partial
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


class Client:
    """A connected launcher, with its workers by process id."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = b""
        self.workers: dict[int, str] = {}

    def kill(self, name: str | None = None) -> None:
        """Kill the worker of this name, or all workers of this launcher if no name is given."""
        for pid, own in self.workers.items():
            if name in (None, own):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)


class ForkServer:
    """The server, which runs until its process ends."""

    def __init__(self, path: str) -> None:
        """Listen on the socket. Launchers can connect from now on; `serve` answers them."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._selector = selectors.DefaultSelector()
        self._owners: list[Client] = []
        self._deaths, self._signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._requests: msgspec.json.Decoder[Start | Kill] = msgspec.json.Decoder(Start | Kill)

    def serve(self) -> NoReturn:
        """Answer launchers, forever."""
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._selector.register(self._deaths, selectors.EVENT_READ, self._reap)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        owner = Client(connection)
        self._owners.append(owner)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._hear, owner))

    def _hear(self, owner: Client) -> None:
        try:
            received = owner.connection.recv(1 << 16)
        except OSError:
            received = b""
        if not received:
            owner.kill()
            self._selector.unregister(owner.connection)
            owner.connection.close()
            self._forget(owner)
            return
        *lines, owner.lines = (owner.lines + received).split(b"\n")
        for line in lines:
            match self._requests.decode(line):
                case Start() as start:
                    self._fork(owner, start)
                case Kill(name=name):
                    owner.kill(name)

    def _fork(self, owner: Client, start: Start) -> None:
        pid = os.fork()
        if pid == 0:
            self._become(start)
        owner.workers[pid] = start.name

    def _become(self, start: Start) -> NoReturn:
        """Run a worker in the forked process. Nothing of the fork server stays open or continues there."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._close()
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

    def _close(self) -> None:
        self._listener.close()
        self._selector.close()
        os.close(self._deaths)
        os.close(self._signalled)
        for owner in self._owners:
            owner.connection.close()

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._deaths, 1 << 12)
        while (ended := _next_ended()) is not None:
            pid, status = ended
            owner = next((owner for owner in self._owners if pid in owner.workers), None)
            if owner is None:
                continue  # Not a worker, but a process that a library started while it was loaded.
            message = WorkerEnded(name=owner.workers.pop(pid), code=os.waitstatus_to_exitcode(status))
            with contextlib.suppress(OSError):  # Its launcher is gone, so nobody needs this message.
                owner.connection.sendall(msgspec.json.encode(message) + b"\n")
            self._forget(owner)

    def _forget(self, owner: Client) -> None:
        """Forget a launcher that has disconnected, once all its workers have ended."""
        if owner.connection.fileno() < 0 and not owner.workers:
            self._owners.remove(owner)


def _next_ended() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


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


def main() -> NoReturn:
    """Listen on the socket, load the libraries, and serve."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ForkServer(sys.argv[1])
    import headrace.engines.embedded.building
    import headrace.engines.serving
    import headrace.training.serving  # noqa: F401

    # The loaded objects stay alive, so the garbage collector need not visit them again in any fork.
    gc.collect()
    gc.freeze()
    server.serve()


if __name__ == "__main__":
    main()

"""A fork server for all runs of a process: none of them has to load anything."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cluster.launchers.fork_server import ROOM
from headrace.cluster.launchers.local import SHARED

SERVER = """
import os, signal, socket, sys

from headrace.channel.worker_side import die_with_parent
from headrace.cluster.launchers.fork_server import ForkServer, load_libraries

die_with_parent()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen(64)
load_libraries()
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    connection, _ = listener.accept()
    if os.fork() == 0:
        listener.close()
        die_with_parent()
        ForkServer(connection).serve()
    connection.close()
"""


@contextmanager
def shared_fork_server(directory: Path, **environment: str) -> Iterator[None]:
    """Runs that begin meanwhile have forks of one fork server, whose socket and log are in this directory."""
    # The module's name tells `stops/sitecustomize.py` that workers are forked here.
    command = [sys.executable, "-c", SERVER, str(directory / "fork"), "headrace.cluster.launchers.fork_server"]
    with (directory / "fork_server.log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen([*command, " " * ROOM], stdout=log, stderr=log, env={**os.environ, **environment})
        patch.setenv(SHARED, str(directory / "fork"))
        try:
            deadline = time.monotonic() + 60.0
            while not (directory / "fork").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            yield
        finally:
            process.kill()
            process.wait()

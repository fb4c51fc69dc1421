"""A fork server for all runs of a process: none of them has to load anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cluster.launchers.fork_server import ROOM
from headrace.cluster.launchers.local import SHARED


@contextmanager
def shared_fork_server(directory: Path, **environment: str) -> Iterator[None]:
    """Runs that begin meanwhile fork their workers from one fork server, whose socket and log are in this directory."""
    command = [sys.executable, "-m", "headrace.cluster.launchers.fork_server", str(directory / "fork"), " " * ROOM]
    with (directory / "fork_server.log").open("wb") as log, pytest.MonkeyPatch.context() as patch:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})
        patch.setenv(SHARED, str(directory / "fork"))
        try:
            yield
        finally:
            process.kill()
            process.wait()

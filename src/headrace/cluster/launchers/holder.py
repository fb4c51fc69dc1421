"""The process that stands beside a worker on another host: it starts the worker, and tells how the worker ended.

A launcher runs a `Holder` on the worker's host, by whatever reaches that host. The worker ends with its holder, even if
the holder is killed: a worker has the system kill it when the thread that started it ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.cluster.base import KEY_LINE
from headrace.cluster.launchers.exits import LAST_BYTES, last_lines

FOREIGN = ("RAY_", "SLURM_", "PMIX_", "PMI_", "MPI_", "OMPI_")
"""How variables begin that are about the processes of a scheduler. Libraries in a worker would take them for theirs."""
LOOK_SECONDS = 0.02


class Holder:
    """One worker on this host, started with its holder."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], directory: str) -> None:
        """Start Python with these arguments, in a session of its own.

        The environment is that of this process, without what a scheduler has added, and with these variables. The
        working directory is `directory` if this host has it. The output goes to a file without a name in this host's
        temporary directory, so nothing is left of it.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._begin = 0
        # The system kills the worker when the thread that started it ends. This thread lives as long as the process.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="worker")
        self._process = self._thread.submit(
            subprocess.Popen[bytes],
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**kept, "PYTHONUNBUFFERED": "1", **environment},
            cwd=directory if Path(directory).is_dir() else None,
            start_new_session=True,
        ).result()
        self._code = self._thread.submit(self._process.wait)

    def key(self, printed: bool) -> str:
        """Wait until the worker has printed its public key, and return the key.

        Returns an empty text at once if the worker prints none, and when the worker ends before it has printed one.
        """
        while printed:
            ended = self._code.done()
            output = os.pread(self._output.fileno(), LAST_BYTES, 0)
            begin = output.find(KEY_LINE.encode())
            end = output.find(b"\n", begin)
            if begin >= 0 and end >= 0:
                self._begin = end + 1
                return output[begin + len(KEY_LINE) : end].decode(errors="replace").strip()
            if ended:
                break
            time.sleep(LOOK_SECONDS)
        return ""

    def wait(self) -> tuple[int, str]:
        """Wait until the worker ends. Return its exit code, negative for a signal, and its last lines of output."""
        return self._code.result(), last_lines(self._output, self._begin)

    def kill(self) -> None:
        """Kill the worker and its process group, if the worker still runs."""
        if not self._code.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

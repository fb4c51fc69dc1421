"""NVIDIA's Multi-Process Service for one run: a daemon and a directory of its own, which end with the run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from headrace.errors import UserError

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 20.0


class Mps:
    """A running daemon. Processes started with `environment` share the GPU through it."""

    def __init__(self) -> None:
        """Start it; a `UserError` with one line where that cannot be done."""
        control = shutil.which(CONTROL)
        if control is None:
            raise UserError(f'[pipeline] one_gpu = "mps": {CONTROL} is not installed here (take "turns")')
        self._control = control
        # Short: the daemon's socket lies in it, and a socket's path is at most about a hundred characters long.
        self._directory = tempfile.mkdtemp(prefix="headrace-mps-")
        self.environment = dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), self._directory)
        try:
            self._run("-d")
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(self._directory, ignore_errors=True)
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f'[pipeline] one_gpu = "mps": the daemon does not start: {reason}') from error

    def stop(self) -> None:
        """End the daemon. Idempotent."""
        if Path(self._directory).is_dir():
            # Where it is gone already, there is nothing to end.
            with suppress(OSError, subprocess.SubprocessError):
                self._run(text="quit\n")
            shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self, *arguments: str, text: str = "") -> None:
        subprocess.run(
            [self._control, *arguments],
            input=text.encode(),
            env={**os.environ, **self.environment},
            timeout=SECONDS,
            check=True,
            capture_output=True,
        )

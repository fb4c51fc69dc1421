"""NVIDIA's Multi-Process Service (MPS) for one run: a daemon with its own directory, both of which end with the run.

A daemon survives when its controller is killed. The next run on this host finds it by the free lock on its directory
and ends it. Where no daemon can be started, trainer and engines take turns on their GPU instead.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.cluster.socket_dir import SocketDir, sweep_socket_dirs
from headrace.config import Config

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 20.0
PREFIX = "headrace-mps-"
TURNS_INSTEAD = "HEADRACE_TURNS_INSTEAD_OF_MPS"
"""This variable is set for workers that should share their GPU through a daemon when no daemon could be started."""


class Mps:
    """The daemon of a run, if its configuration asks for one and it can be started."""

    def __init__(self, config: Config) -> None:
        self.missing = ""
        """Why the daemon does not run although it was asked for, in one line."""
        self.environment: dict[str, str] = {}
        """The environment variables that tell workers how they share their GPU."""
        self._directory: SocketDir | None = None
        if config.pipeline.one_gpu == "mps":
            self._start()
            if self.missing:
                self.environment = {TURNS_INSTEAD: self.missing}

    def _start(self) -> None:
        if shutil.which(CONTROL) is None:
            self.missing = f"{CONTROL} is not installed here"
            return
        # The path must be short: it holds the daemon's socket, whose path may have at most about a hundred characters.
        self._directory = SocketDir(PREFIX)
        self.environment = _environment(self._directory.path)
        try:
            _call(self._directory.path, "-d")
        except (OSError, subprocess.SubprocessError) as error:
            self.missing = f"its daemon does not start: {_first_line(error)}"
            # The daemon may have started without saying so.
            self.stop()

    def stop(self) -> None:
        """End the daemon. Idempotent."""
        if self._directory is not None:
            # If the daemon is gone already, there is nothing to end.
            with suppress(OSError, subprocess.SubprocessError):
                _call(self._directory.path, text="quit\n")
            self._directory.remove()
            self._directory = None


def without_mps(config: Config, environment: Mapping[str, str]) -> Config:
    """Return the configuration that applies to a worker with this environment: turns, if there is no daemon."""
    if TURNS_INSTEAD not in environment:
        return config
    return msgspec.structs.replace(config, pipeline=msgspec.structs.replace(config.pipeline, one_gpu="turns"))


def sweep_daemons() -> list[str]:
    """End this user's daemons whose controller is dead. Returns the names of their directories."""
    return sweep_socket_dirs(PREFIX, _end_daemon)


def _end_daemon(directory: Path) -> None:
    if shutil.which(CONTROL) is None:
        return
    try:
        _call(directory, text="quit\n")
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{CONTROL} does not answer") from error
    except subprocess.CalledProcessError:
        pass  # The daemon is gone already.


def _environment(directory: Path) -> dict[str, str]:
    return dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(directory))


def _call(directory: Path, *arguments: str, text: str = "") -> None:
    subprocess.run(
        [CONTROL, *arguments],
        input=text.encode(),
        env={**os.environ, **_environment(directory)},
        timeout=SECONDS,
        check=True,
        capture_output=True,
    )


def _first_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
    lines = [*(said or b"").decode(errors="replace").strip().splitlines(), *str(error).strip().splitlines()]
    return lines[0] if lines else type(error).__name__

"""NVIDIA's Multi-Process Service (MPS) for one run: a daemon with its own directory, both of which end with the run.

A daemon survives when its controller is killed. The next run on this host finds it by the free lock on its directory
and ends it. Where no daemon can be started, trainer and engines take turns on their GPU instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.cluster.socket_dir import SocketDir, sweep_socket_dirs
from headrace.config import Config
from headrace.errors import HeadraceError

CONTROL = "nvidia-cuda-mps-control"
SECONDS = 20.0
PREFIX = "headrace-mps-"
TURNS_INSTEAD = "HEADRACE_TURNS_INSTEAD_OF_MPS"
"""This variable is set for workers that should share their GPU through a daemon when no daemon could be started."""


class Mps:
    """A running MPS daemon. Processes started with `environment` share the GPU through it."""

    def __init__(self) -> None:
        """Start the daemon. Raises `HeadraceError` with one line if that fails."""
        control = shutil.which(CONTROL)
        if control is None:
            raise HeadraceError(f"{CONTROL} is not installed here")
        self._control = control
        # The path must be short: it holds the daemon's socket, whose path may have at most about a hundred characters.
        self._directory = SocketDir(PREFIX)
        self.environment = _environment(self._directory.path)
        try:
            _call(control, self._directory.path, "-d")
        except (OSError, subprocess.SubprocessError) as error:
            # The daemon may have started without saying so.
            self.stop()
            raise HeadraceError(f"its daemon does not start: {_first_line(error)}") from error

    def stop(self) -> None:
        """End the daemon. Idempotent."""
        if self._directory.path.is_dir():
            # If the daemon is gone already, there is nothing to end.
            with suppress(OSError, subprocess.SubprocessError):
                _call(self._control, self._directory.path, text="quit\n")
            self._directory.remove()


def start_mps(config: Config) -> tuple[Mps | None, str]:
    """Start the daemon if the configuration asks for one.

    Returns the daemon, or None and, if the daemon was asked for and could not be started, the reason.
    """
    if config.pipeline.one_gpu != "mps":
        return None, ""
    try:
        return Mps(), ""
    except HeadraceError as error:
        return None, str(error)


def environment_of_workers(mps: Mps | None, no_mps: str) -> dict[str, str]:
    """Return the environment variables that tell workers how they share their GPU, after `start_mps`."""
    if mps is not None:
        return mps.environment
    return {TURNS_INSTEAD: no_mps} if no_mps else {}


def without_mps(config: Config, environment: Mapping[str, str]) -> Config:
    """Return the configuration that applies to a worker with this environment: turns, if there is no daemon."""
    if TURNS_INSTEAD not in environment:
        return config
    return msgspec.structs.replace(config, pipeline=msgspec.structs.replace(config.pipeline, one_gpu="turns"))


def sweep_daemons() -> list[str]:
    """End this user's daemons whose controller is dead. Returns the names of their directories."""
    return sweep_socket_dirs(PREFIX, _end_daemon)


def _end_daemon(directory: Path) -> None:
    control = shutil.which(CONTROL)
    if control is None:
        return
    try:
        _call(control, directory, text="quit\n")
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"{CONTROL} does not answer") from error
    except subprocess.CalledProcessError:
        pass  # The daemon is gone already.


def _environment(directory: Path) -> dict[str, str]:
    return dict.fromkeys(("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"), str(directory))


def _call(control: str, directory: Path, *arguments: str, text: str = "") -> None:
    subprocess.run(
        [control, *arguments],
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

"""NVIDIA's Multi-Process Service for one run: a daemon and a directory of its own, which end with the run.

A daemon lives on when its controller is killed: the next run on this host ends it, by the lock on its directory.
Where no daemon can be started, trainer and engines take turns on their GPU instead.
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
"""Set in the environment of workers that were to share their GPU through a daemon, and have none."""


class NoMps(HeadraceError):
    """Why there is no daemon, in one line."""


class Mps:
    """A running daemon. Processes started with `environment` share the GPU through it."""

    def __init__(self) -> None:
        """Start it; `NoMps` where that cannot be done."""
        control = shutil.which(CONTROL)
        if control is None:
            raise NoMps(f"{CONTROL} is not installed here")
        self._control = control
        # Short: the daemon's socket lies in it, and a socket's path is at most about a hundred characters long.
        self._directory = SocketDir(PREFIX)
        self.environment = _environment(self._directory.path)
        try:
            _call(control, self._directory.path, "-d")
        except (OSError, subprocess.SubprocessError) as error:
            # It may have started and not said so.
            self.stop()
            raise NoMps(f"its daemon does not start: {_first_line(error)}") from error

    def stop(self) -> None:
        """End the daemon. Idempotent."""
        if self._directory.path.is_dir():
            # Where it is gone already, there is nothing to end.
            with suppress(OSError, subprocess.SubprocessError):
                _call(self._control, self._directory.path, text="quit\n")
            self._directory.remove()


def start_mps(config: Config) -> tuple[Mps | None, str]:
    """The daemon, where the configuration asks for one; why there is none, where it asks in vain."""
    if config.pipeline.one_gpu != "mps":
        return None, ""
    try:
        return Mps(), ""
    except NoMps as error:
        return None, str(error)


def environment_of_workers(mps: Mps | None, no_mps: str) -> dict[str, str]:
    """What tells workers how they share their GPU, after `start_mps`."""
    if mps is not None:
        return mps.environment
    return {TURNS_INSTEAD: no_mps} if no_mps else {}


def without_mps(config: Config, environment: Mapping[str, str]) -> Config:
    """The configuration as it is in force for a worker with this environment."""
    if TURNS_INSTEAD not in environment:
        return config
    return msgspec.structs.replace(config, pipeline=msgspec.structs.replace(config.pipeline, one_gpu="turns"))


def sweep_daemons() -> list[str]:
    """End this user's daemons whose controller is dead; the names of their directories."""
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
        pass  # It is gone already.


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

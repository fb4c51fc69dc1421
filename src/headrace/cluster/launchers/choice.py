"""Which launcher a run has: workers are forked where that is safe, and start one by one elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.cluster.launchers.base import Launcher
from headrace.cluster.launchers.forked import ForkedLauncher
from headrace.cluster.launchers.local import LocalLauncher
from headrace.config import Config

GPU_DRIVER = Path("/dev/nvidiactl")


def make_launcher(config: Config, environment: Mapping[str, str] | None = None) -> Launcher:
    """`[pipeline] launcher`; `environment` is added to that of every worker."""
    asked = config.pipeline.launcher
    if asked == "forked" or (asked == "auto" and _forks_are_safe(config)):
        return ForkedLauncher(environment)
    return LocalLauncher(environment)


def _forks_are_safe(config: Config) -> bool:
    """A library that looks for a GPU while it is loaded could spoil it for every fork; on macOS, the system's do."""
    on_cpu = {config.engine.device, config.training.device} == {"cpu"} or not GPU_DRIVER.exists()
    return sys.platform == "linux" and on_cpu

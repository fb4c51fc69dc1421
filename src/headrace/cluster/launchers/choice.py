"""The choice of a run's launcher: workers are forked where that is safe, and started one by one elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.cluster.launchers.base import Launcher
from headrace.cluster.launchers.forked import ForkedLauncher
from headrace.cluster.launchers.local import LocalLauncher
from headrace.config import Config
from headrace.errors import ConfigError
from headrace.reference import call_factory, import_function

GPU_DRIVER = Path("/dev/nvidiactl")


LAUNCHERS: dict[str, Callable[[Mapping[str, str]], Launcher]] = {"local": LocalLauncher, "forked": ForkedLauncher}
"""The built-in launchers, by their names in `[pipeline] launcher`."""


def make_launcher(config: Config, environment: Mapping[str, str] | None = None) -> Launcher:
    """Make the launcher that `[pipeline] launcher` names. `environment` is added to that of every worker."""
    name = config.pipeline.launcher
    if name == "auto":
        name = "forked" if _forks_are_safe(config) else "local"
    return LAUNCHERS[name](environment or {}) if name in LAUNCHERS else _launcher_of_user(name, environment or {})


def _launcher_of_user(reference: str, environment: Mapping[str, str]) -> Launcher:
    made: Launcher = call_factory(f"[pipeline] launcher: {reference}", import_function(reference), environment)
    for method in ("start", "next_exit", "kill", "stop"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f"[pipeline] launcher: {reference} made a {type(made).__name__} without {method!r}")
    return made


def _forks_are_safe(config: Config) -> bool:
    """Return whether workers may be forked on this system.

    A library that initializes a GPU while it is loaded could break that GPU for every fork. On macOS, the system's own
    libraries are not safe to fork.
    """
    on_cpu = {config.engine.device, config.training.device} == {"cpu"} or not GPU_DRIVER.exists()
    return sys.platform == "linux" and on_cpu

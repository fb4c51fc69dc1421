"""Loaded by every Python whose PYTHONPATH has this directory: kills at a chosen point of a run, and full disks.

HEADRACE_STOP is `role function count victim file`: when a worker of that role (trainer, engine) calls
`module:function` for the count-th time, the victim (self, controller) is killed before anything is done; nobody: it
hangs. It happens once: the process that makes the file is the one that kills.

HEADRACE_FULL is `role bytes`: processes of that role cannot make any file larger, by a limit of the operating system.

Workers are forks of a seed that has loaded this: what was asked for is put in place as the first act of the fork.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WORKER = "headrace.cluster.worker_main"
FORK_SERVER = "headrace.cluster.launchers.fork_server"


class MeddledWorkers(importlib.abc.MetaPathFinder):
    """When the worker's module is imported, its `main` begins with what was asked for."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def with_main(module: Any) -> None:
            execute(module)
            main = module.main

            def meddled(arguments: Sequence[str]) -> int:
                role = arguments[arguments.index("--role") + 1]
                limit_files(role)
                stop_at_point(role)
                return int(main(arguments))

            module.main = meddled

        spec.loader.exec_module = with_main  # type: ignore[method-assign]
        return spec


def limit_files(role: str) -> None:
    if "HEADRACE_FULL" in os.environ:
        whose, limit = os.environ["HEADRACE_FULL"].split()
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit) if role == whose else hard, hard))


def stop_at_point(role: str) -> None:
    if "HEADRACE_STOP" not in os.environ:
        return
    whose, point, count, victim, file = os.environ["HEADRACE_STOP"].split()
    if role != whose:
        return
    module, function = point.split(":")
    *owners, last = function.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, last)
    stopping = stops(original, int(count), victim, Path(file))
    setattr(owner, last, stopping)
    for other in [found for name, found in sys.modules.items() if name.startswith("headrace.")]:
        for name in [name for name, value in vars(other).items() if value is original]:
            setattr(other, name, stopping)


def stops(function: Callable[..., Any], count: int, victim: str, file: Path) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not file.exists():
            file.touch()
            if victim != "nobody":
                os.kill(os.getpid() if victim == "self" else int(os.environ["HEADRACE_CONTROLLER"]), signal.SIGKILL)
            time.sleep(600)  # Who kills the controller goes with it.
        return function(*arguments, **named)

    return called


if FORK_SERVER in sys.orig_argv:
    sys.meta_path.insert(0, MeddledWorkers())
elif "headrace" in sys.orig_argv:
    os.environ["HEADRACE_CONTROLLER"] = str(os.getpid())
    limit_files("controller")

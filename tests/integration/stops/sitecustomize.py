"""Loaded by every Python of a run whose PYTHONPATH has this directory: kills at a chosen point, and full disks.

HEADRACE_STOP is `role function count victim file`: when a process of that role (trainer, engine, controller) calls
`module:function` for the count-th time, the victim (self, parent) is killed before anything is done; nobody: it hangs.
It happens once: the process that makes the file is the one that kills.

HEADRACE_FULL is `role bytes`: processes of that role cannot make any file larger, by a limit of the operating system.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any


class _Patched(importlib.abc.MetaPathFinder):
    """Puts the kill into a function of a module when that is imported."""

    def __init__(self, module: str, function: str, count: int, victim: str, file: str) -> None:
        self.module, self.function, self.count, self.victim, self.file = module, function, count, victim, Path(file)
        self.calls = 0

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def patched(module: Any) -> None:
            execute(module)
            *owners, last = self.function.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, last, self._stopping(getattr(owner, last)))

        spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec

    def _stopping(self, function: Any) -> Any:
        @functools.wraps(function)
        def called(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls == self.count and not self.file.exists():
                self.file.touch()
                if self.victim != "nobody":
                    os.kill(os.getpid() if self.victim == "self" else os.getppid(), signal.SIGKILL)
                time.sleep(600)  # Who kills its parent goes with it.
            return function(*arguments, **named)

        return called


def _role() -> str:
    if "headrace.pipeline.worker" in sys.orig_argv:
        return sys.orig_argv[sys.orig_argv.index("--role") + 1]
    return "controller" if "headrace" in sys.orig_argv else ""


if "HEADRACE_FULL" in os.environ:
    role, limit = os.environ["HEADRACE_FULL"].split()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit) if role == _role() else hard, hard))
if "HEADRACE_STOP" in os.environ:
    role, point, times, whom, once = os.environ["HEADRACE_STOP"].split()
    if role == _role():
        sys.meta_path.insert(0, _Patched(*point.split(":"), int(times), whom, once))

"""Without a GPU, Triton's kernels run in its interpreter; that is decided before a kernel's module is imported."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    # The bounds of a loop are arrays of one number there, which numpy 2.4 no longer takes for a number.
    interpreter._patch_lang_tensor = patch_tensor_and_index

    patch_language = interpreter._patch_lang
    patched: set[str] = set()

    def patch_for_kernel(kernel: Any) -> Any:
        patched.clear()
        return patch_language(kernel)

    def call_function(self: Any, *arguments: Any, **options: Any) -> Any:
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            patch_language(self.fn)
        return self.rewrite()(*arguments, **options)

    # The interpreter patches Triton's language at every call of a function within a kernel, a fifth of its time, and
    # takes nothing back before the kernel ends. Once for each module is enough.
    interpreter._patch_lang = patch_for_kernel
    interpreter.InterpretedFunction.__call__ = call_function


# How long an example takes says something of the machine, and of what else runs there, and nothing of the code.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

KILLERS = ("segments_left", "worker_pids")
"""What files name whose tests kill processes of runs, or look for what these leave behind."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of one file share a worker, and so do all that would see what others have killed, where no `--dist` is."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "killers" if kills(config.rootpath / file) else file

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that kill go first: they are the longest of all that share a worker."""
    items.sort(key=lambda item: not kills(item.path))


@functools.cache
def kills(file: Path) -> bool:
    text = file.read_text()
    return any(name in text for name in KILLERS)

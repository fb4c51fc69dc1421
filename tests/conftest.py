"""Without a GPU, Triton's kernels run in its interpreter; that is decided before a kernel's module is imported."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    # The bounds of a loop are arrays of one number there, which numpy 2.4 no longer takes for a number.
    interpreter._patch_lang_tensor = patch_tensor_and_index


KILLERS = {"segments_left", "worker_pids"}
"""What tests import that kill processes of runs, or look for what these leave behind."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one file share a worker, and so do all that would see what others have killed."""
    for item in items:
        kills = not KILLERS.isdisjoint(vars(getattr(item, "module", None) or object))
        item.add_marker(pytest.mark.xdist_group("killers" if kills else item.path.name))

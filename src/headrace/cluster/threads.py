"""The number of compute threads of a process."""

from __future__ import annotations

import os


def fix_threads(threads: int) -> None:
    """Fix the number of compute threads of this process, because sums depend on it to the last bit.

    Call this before torch is used.
    """
    announce_threads(threads)
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def announce_threads(threads: int) -> None:
    """Set the number of threads in the environment, for libraries that read it on import and for child processes."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(threads)

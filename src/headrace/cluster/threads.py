"""How many threads compute in a process."""

from __future__ import annotations

import os


def fix_threads(threads: int) -> None:
    """How many threads compute, here: sums depend on it to the last bit. Call it before torch is used."""
    announce_threads(threads)
    import torch

    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)


def announce_threads(threads: int) -> None:
    """For libraries that look when they are loaded, here and in processes that are started from here."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = str(threads)

"""What tests of processes wait for and look at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path


async def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until this holds. Raises `TimeoutError` if it does not within these seconds."""
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def alive(pid: int | str) -> bool:
    """Whether a process runs; one that is dead but not yet collected by its new parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

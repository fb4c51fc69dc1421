"""Runs that are stopped at a chosen point of the code, or find their disk full; see `stops/sitecustomize.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def meddled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The next run loads `stops/sitecustomize.py` in every process."""
    search = [str(Path(__file__).parent / "stops"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search))
    return monkeypatch


@pytest.fixture
def stop(tmp_path: Path, meddled: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Have the next run stopped where a process of a role calls a function; gives the file that is there afterwards."""

    def at(role: str, point: str, count: int, victim: str = "self") -> Path:
        stopped = tmp_path / "stopped"
        meddled.setenv("HEADRACE_STOP", f"{role} {point} {count} {victim} {stopped}")
        return stopped

    return at


@pytest.fixture
def full(meddled: pytest.MonkeyPatch) -> Callable[[str, int | None], None]:
    """From now on files of processes of this role can be no larger than this; None: as large as they like."""

    def disk(role: str, limit: int | None) -> None:
        if limit is None:
            meddled.delenv("HEADRACE_FULL")
        else:
            meddled.setenv("HEADRACE_FULL", f"{role} {limit}")

    return disk

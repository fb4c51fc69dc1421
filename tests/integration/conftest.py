"""Runs that are stopped at a chosen point of the code, or find their disk full; see `stops/sitecustomize.py`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from shared_fork_server import shared_fork_server


def meddling() -> str:
    """PYTHONPATH with `stops/sitecustomize.py`."""
    return os.pathsep.join([str(Path(__file__).parent / "stops"), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session", autouse=True)
def seed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """None of these runs has to load anything."""
    with shared_fork_server(tmp_path_factory.mktemp("seed"), PYTHONPATH=meddling()):
        yield


@pytest.fixture
def meddled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The next run loads `stops/sitecustomize.py`, which the seed has loaded anyway."""
    monkeypatch.setenv("PYTHONPATH", meddling())
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

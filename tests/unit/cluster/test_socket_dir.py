"""Directories of sockets: one of a living owner stays, one of a dead owner goes with the next sweep."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.cluster.socket_dir import PREFIX, SocketDir, sweep_socket_dirs

OWNER = """
from headrace.cluster.socket_dir import SocketDir
made = SocketDir()
(made.path / "hub").touch()
print(made.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_what_a_killed_owner_leaves_is_swept_and_nothing_else(tmp_path: Path) -> None:
    mine = SocketDir()
    (tmp_path / "headrace-other").mkdir()
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    theirs = Path(owner.stdout.readline().strip())
    assert sweep_socket_dirs() == [] and (theirs / "hub").exists()
    owner.kill()
    owner.communicate()
    assert sweep_socket_dirs() == [theirs.name]
    assert mine.path.is_dir() and not theirs.exists()
    mine.remove()
    mine.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["headrace-other"]


def test_a_directory_that_is_swept_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, []

    def swept_once(**options: str) -> str:
        made.append(make(**options))
        return made[-1]

    opened = os.open

    def late(path: Path, *arguments: int) -> int:
        descriptor = opened(path, *arguments)
        if len(made) == 1 and str(path) == made[0]:
            os.rmdir(made[0])  # noqa: PTH106
        return descriptor

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", swept_once)
        patched.setattr(os, "open", late)
        directory = SocketDir()
    assert len(made) == 2 and str(directory.path) == made[1] and directory.path.name.startswith(PREFIX)
    directory.remove()
    assert list(tmp_path.iterdir()) == []

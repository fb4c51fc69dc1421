"""The attack suite runs: a case is tried again by its number, and an unknown kind is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from runs import ROOT


def attack(*options: str) -> subprocess.CompletedProcess[str]:
    folders = [str(ROOT / "tests"), str(ROOT / "tests/integration"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/attack"), *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        check=False,
    )


@pytest.mark.slow
def test_a_case_is_tried_again_by_its_number() -> None:
    first, again = (attack("--seed", "7", "--only", "config:3") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.splitlines()[0].startswith("config:3  ")
    assert first.stdout.splitlines()[:3] == again.stdout.splitlines()[:3]


def test_an_unknown_kind_is_refused() -> None:
    done = attack("--only", "nothing")
    assert done.returncode == 2 and "nothing" in done.stderr and "Traceback" not in done.stderr

"""Adding a loss takes one file and one test: in a copy of the source, the example of the documents becomes a loss."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from runs import NAME, QUICKSTART, ROOT, small_settings

DEFINITION = '    if name == "reinforce":\n'
"""A branch of `one` in `tests/plain_losses.py`, before which that of the new loss goes."""
TESTS_OF_EVERY_LOSS = (
    "tests/unit/algorithms/test_losses.py::test_values_and_gradients_against_the_definition",
    "tests/unit/algorithms/test_losses.py::test_on_policy_all_are_the_policy_gradient",
    "tests/unit/training/test_packed_gradients.py::test_every_loss_whatever_the_packing",
)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source and tests as they are, with one file more and one definition more."""
    path = tmp_path_factory.mktemp("checkout")
    for folder in ("src", "tests"):
        shutil.copytree(ROOT / folder, path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", path)
    [example] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/losses.md").read_text(), re.MULTILINE | re.DOTALL)
    (path / "src/headrace/algorithms/losses/policy/plain.py").write_text(example)
    plain_losses = path / "tests/plain_losses.py"
    text = plain_losses.read_text()
    assert text.count(DEFINITION) == 1
    plain_losses.write_text(
        text.replace(DEFINITION, f'    if name == "plain":\n        return -ratio * a\n{DEFINITION}')
    )
    return path


def python(checkout: Path, *arguments: str, cwd: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=200, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def headrace(checkout: Path, command: str, *settings: str) -> str:
    changes = [word for setting in settings for word in ("--set", setting)]
    return python(checkout, "-m", "headrace", *command.split(), str(QUICKSTART), *changes, cwd=ROOT)


def test_a_module_is_a_loss_by_its_name(checkout: Path) -> None:
    assert 'loss = "plain"' in headrace(checkout, "check --full", "algorithm.loss=plain")


@pytest.mark.slow
def test_it_trains(checkout: Path, tmp_path: Path) -> None:
    # Workers of its own: those of other tests are forks of a process that has loaded the source as it is.
    more = ("algorithm.loss=plain", "run.versions=2", "pipeline.launcher=local")
    headrace(checkout, "train", *small_settings(tmp_path, *more))
    with sqlite3.connect(tmp_path / NAME / "journal.db") as journal:
        losses = journal.execute("SELECT loss FROM steps WHERE objective = 'policy'").fetchall()
    assert len(losses) == 2
    assert (None,) not in losses


def test_the_tests_of_every_loss_run_over_it(checkout: Path) -> None:
    said = python(
        checkout, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-k", "plain", *TESTS_OF_EVERY_LOSS, cwd=checkout
    )
    for test in TESTS_OF_EVERY_LOSS:
        assert re.search(rf"PASSED {test}\[\S*plain", said), said

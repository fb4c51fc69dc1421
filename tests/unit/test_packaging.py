"""An installed Headrace has all its files, also those that are not Python."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_file_that_is_not_python_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = ROOT / "src" / "headrace"
    named = project["tool"]["setuptools"]["package-data"]["headrace"]
    found = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    assert sorted(named) == sorted(name for name in found if not name.endswith((".py", ".pyc")))

"""An installed Headrace has all its files, also those that are not Python."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.errors import UserError

ROOT = Path(__file__).parents[2]


def test_every_file_that_is_not_python_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    package = ROOT / "src" / "headrace"
    named = project["tool"]["setuptools"]["package-data"]["headrace"]
    found = [path.relative_to(package).as_posix() for path in package.rglob("*") if path.is_file()]
    assert sorted(named) == sorted(name for name in found if not name.endswith((".py", ".pyc")))


def test_every_example_is_packaged() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named: set[Path] = set()
    for target, patterns in project["tool"]["setuptools"]["data-files"].items():
        for pattern in patterns:
            files = [file for file in ROOT.glob(pattern) if file.is_file()]
            assert files, f"{pattern} names no file"
            assert {file.parent.relative_to(ROOT).as_posix() for file in files} == {
                target.removeprefix("share/headrace/")
            }
            named |= set(files)
    made = {ROOT / "examples/smollm2/model", ROOT / "examples/steps/reward_model"}
    made |= {*ROOT.glob("examples/**/__pycache__"), *ROOT.glob("examples/**/.*")}
    found = {file for file in ROOT.glob("examples/**/*") if file.is_file()}
    assert named == {file for file in found if file not in made and not made & set(file.parents)}


def test_every_extra_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rows = re.findall(r"^\| `([\w-]+)` \| ", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(project["project"]["optional-dependencies"])


def test_examples_are_copied(tmp_path: Path) -> None:
    cli = CliRunner()
    assert cli.invoke(app, ["examples", "--output", str(tmp_path)]).exit_code == 0
    copied = {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()}
    assert {Path("examples/quickstart/quickstart.toml"), Path("examples/quickstart/model/tokenizer.json")} <= copied
    assert all((ROOT / file).read_bytes() == (tmp_path / file).read_bytes() for file in copied)
    again = cli.invoke(app, ["examples", "--output", str(tmp_path)])
    assert isinstance(again.exception, UserError)

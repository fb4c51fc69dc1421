"""`headrace examples`: the shipped examples, copied from where Headrace is installed."""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import UserError

FIRST = Path("examples/quickstart/quickstart.toml")
"""A file by which the folder of the examples is found."""


def examples(
    output: Annotated[str, typer.Option(help="The directory in which the folder `examples` is made.")] = ".",
) -> None:
    """Copy the shipped examples to `examples`, so that the commands of the documentation work without a checkout."""
    folder = Path(output) / "examples"
    if folder.exists():
        raise UserError(f"{folder} exists: choose another directory with --output, or remove it")
    try:
        shutil.copytree(_shipped(), folder, ignore=_not_shipped)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror or error}") from error
    typer.echo(f"{folder}: begin with `headrace train {FIRST}` in {Path(output).resolve()}")


def _shipped() -> Path:
    """Return the folder of the examples: that of the checkout, or else that of the installed package."""
    checkout = Path(__file__).parents[3]
    if (checkout / FIRST).is_file() and (checkout / "pyproject.toml").is_file():
        return checkout / "examples"
    for file in metadata.files("headrace") or ():
        if file.parts[-3:] == FIRST.parts:
            return Path(str(file.locate())).resolve().parents[1]
    raise UserError("this installation of Headrace has no examples; install it from its wheel, or use a checkout")


def _not_shipped(folder: str, names: list[str]) -> set[str]:
    """Return what examples have made or fetched in a checkout."""
    fetched = {"model"} if Path(folder).name == "smollm2" else set()
    return fetched | {name for name in names if name == "__pycache__" or name.startswith(".")}

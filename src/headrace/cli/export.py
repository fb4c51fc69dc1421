"""`headrace export`: writes the model or the adapter of a run, for others to load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from headrace.cli.options import AsJson, RunPath
from headrace.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(export)


def export(
    run_dir: RunPath,
    to: Annotated[Literal["hf", "peft"], typer.Option(help="A whole model for from_pretrained, or the adapter alone.")],
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="A new directory; by default RUN_DIR/export-FORMAT.")
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="step-N", help="By default the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of RUN_DIR as a directory that Hugging Face (`hf`) or peft (`peft`) loads."""
    from headrace.run_dir import RunDir

    paths, _ = RunDir.open(run_dir)
    chosen = _choose(paths.checkpoints, checkpoint)
    from transformers.utils import logging

    from headrace.training.checkpoints.export import export_checkpoint

    logging.disable_progress_bar()
    written = export_checkpoint(chosen, Path(out) if out is not None else paths.path / f"export-{to}", to)
    found = {"checkpoint": chosen.name, "format": to, "directory": str(written)}
    typer.echo(json.dumps(found) if as_json else f"{chosen.name} as {to} in {written}")


def _choose(checkpoints: Path, name: str | None) -> Path:
    from headrace.training.checkpoints.base import by_name, latest

    if name is None:
        newest = latest(checkpoints)
        if newest is None:
            raise UserError(f"{checkpoints.parent} has no checkpoint yet")
        return newest
    known = by_name(checkpoints)
    if name not in known:
        raise UserError(f"--checkpoint {name}: there is none of this name; there are {', '.join(known) or 'none'}")
    return known[name]

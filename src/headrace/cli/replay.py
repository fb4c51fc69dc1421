"""`headrace replay`: trains again what a run recorded, and compares the weights."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from headrace.cli.options import AsJson, RunPath


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(replay)


def replay(
    run_dir: RunPath,
    until: Annotated[int, typer.Option(help="The last version to train; by default the last one of the run.")] = -1,
    as_json: AsJson = False,
) -> None:
    """Train from the journal, in the recorded order, without an engine. Exit code 1 if a version has other weights."""
    from headrace.pipeline.replay import describe, replay_run

    found = replay_run(run_dir, None if until < 0 else until)
    typer.echo(json.dumps(found, indent=2) if as_json else describe(found))
    if not found["identical"]:
        raise typer.Exit(1)

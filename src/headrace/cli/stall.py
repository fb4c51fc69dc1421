"""`headrace stall`: reports who waits for whom in a live run."""

from __future__ import annotations

import msgspec
import typer

from headrace.cli.options import AsJson, RunPath


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(stall)


def stall(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Print what every loop and process of a live run waits for, and since when."""
    from headrace.pipeline.status import describe, read_status

    status = read_status(run_dir)
    typer.echo(msgspec.json.encode(status).decode() if as_json else describe(status))

"""`headrace stall`: reports who waits for whom in a live run.

The command reads `status.json`. A run removes this file when it ends, and the command then fails with one line. A
controller that hangs or was killed leaves an old file, and the report says so.
"""

from __future__ import annotations

import msgspec
import typer

from headrace.cli.options import AsJson, RunPath


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(stall)


def stall(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Print what every loop and process of a live run waits for, and since when. Fails if no run is live there."""
    from headrace.pipeline.status import describe, read_status

    status = read_status(run_dir)
    typer.echo(msgspec.json.encode(status).decode() if as_json else describe(status))

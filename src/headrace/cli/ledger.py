"""`headrace ledger`: reports how every group and rollout ended, and whether the ledgers balance."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from headrace.cli.options import AsJson, RunPath


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(ledger)


def ledger(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Print how many were admitted, trained, dropped, failed and are in flight. Exit code 1 if it does not balance."""
    from headrace.observe.summary import describe_ledgers
    from headrace.review.summary import read_ledgers

    found = read_ledgers(Path(run_dir))
    typer.echo(json.dumps(found, indent=2) if as_json else describe_ledgers(found))
    if not found["balanced"]:
        raise typer.Exit(1)

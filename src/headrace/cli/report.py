"""`headrace report`: makes the summary and the page of a run again from its journal."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from headrace.cli.options import AsJson, RunPath


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)


def report(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Write RUN_DIR/summary.json and RUN_DIR/report.html from its journal, and print the summary."""
    from headrace.observe.summary import describe
    from headrace.review.summary import write_report, write_summary

    summary = write_summary(Path(run_dir))
    page = write_report(Path(run_dir))
    typer.echo(json.dumps(summary, indent=2) if as_json else describe(summary))
    if not as_json:
        typer.echo(f"report: {page}")

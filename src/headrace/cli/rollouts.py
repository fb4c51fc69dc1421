"""`headrace rollouts`: shows or exports the recorded rollouts of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import AsJson, RunPath

SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(rollouts)


def rollouts(
    run_dir: RunPath,
    where: Annotated[str, typer.Option(help='An SQL condition on the table rollouts: "reward >= 1".')] = "TRUE",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many; 20 are shown, all are exported.")] = None,
    export: Annotated[str | None, typer.Option(metavar="FILE", help="Write to FILE.jsonl or FILE.parquet.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Decode the completions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Browse the recorded rollouts of RUN_DIR, or export them with their tokens."""
    from headrace.buffer.reader import open_readonly
    from headrace.review import rollouts as found
    from headrace.review.rollouts import export as write
    from headrace.review.rollouts import writer_for
    from headrace.run_dir import RunDir

    path = Path(run_dir)
    if export is not None:
        writer_for(Path(export))
    with open_readonly(RunDir(path).journal) as journal:
        total = journal.count_rollouts(where)
        chat = found.load_chat(path) if text else None
        if export is not None:
            written = write(Path(export), journal, journal.rollout_records(where, limit=limit), chat)
            typer.echo(json.dumps({"records": written, "file": export}) if as_json else f"{written:,} in {export}")
            return
        records = journal.rollout_records(where, limit=SHOWN if limit is None and not as_json else limit)
        entries = list(found.shown(journal, records, chat))
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    for line in found.table(entries):
        typer.echo(line)
    typer.echo(f"{len(entries):,} of {total:,} rollouts")

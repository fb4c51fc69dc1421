"""The commands that examine a run by its directory: its results, its rollouts, and whether the records are true."""

import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from headrace.cli import AsJson, RunPath
from headrace.errors import UserError

SHOWN = 20


def report(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Write RUN_DIR/summary.json and RUN_DIR/report.html from its journal, and print the summary."""
    from headrace.observe.spans import timeline_damage
    from headrace.observe.summary import describe
    from headrace.review.summary import summarize, write_report, write_summary
    from headrace.run_dir import RunDir

    if problem := timeline_damage(RunDir(Path(run_dir)).timeline):
        typer.echo(f"{problem}; the report shows what is left of it", err=True)
    summary = summarize(Path(run_dir))
    typer.echo(json.dumps(summary, indent=2) if as_json else describe(summary))
    try:
        write_summary(Path(run_dir))
        page = write_report(Path(run_dir))
    except OSError as error:
        raise UserError(f"{error.filename or run_dir} cannot be written: {error.strerror}") from error
    if not as_json:
        typer.echo(f"report: {page}")


def ledger(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Print how many were admitted, trained, dropped, failed and are in flight. Exit code 1 if it does not balance."""
    from headrace.observe.summary import describe_ledgers
    from headrace.review.summary import read_ledgers

    found = read_ledgers(Path(run_dir))
    typer.echo(json.dumps(found, indent=2) if as_json else describe_ledgers(found))
    if not found["balanced"]:
        raise typer.Exit(1)


def rollouts(
    run_dir: RunPath,
    where: Annotated[str, typer.Option(help='An SQL condition on the table rollouts: "reward >= 1".')] = "TRUE",
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many; 20 are shown, all are exported.")] = None,
    export: Annotated[str | None, typer.Option(metavar="FILE", help="Write to FILE.jsonl or FILE.parquet.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Decode the prompts and the completions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Browse the recorded rollouts of RUN_DIR, or export them with their tokens."""
    from headrace.buffer.reader import open_readonly
    from headrace.review import rollouts as found
    from headrace.run_dir import RunDir

    path = Path(run_dir)
    if export is not None:
        found.writer_for(Path(export))
    with open_readonly(RunDir(path).journal) as journal:
        total = journal.count_rollouts(where)
        chat = found.load_chat(path) if text else None
        if chat is not None and (changed := found.changed_tokenizer(journal, chat)):
            typer.echo(changed, err=True)
        if export is not None:
            written = found.export(Path(export), journal, journal.rollout_records(where, limit=limit), chat)
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


def audit(
    run_dir: RunPath,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts to draw.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 0,
    tolerance: Annotated[float, typer.Option(min=0, help="Largest error of a log-probability.")] = 1e-3,
    as_json: AsJson = False,
) -> None:
    """Recompute recorded log-probabilities under the checkpoints of their versions. Exit code 1 if one is wrong."""
    from transformers.utils import logging

    from headrace.review.audit import HINT, describe_audit
    from headrace.review.audit import audit as check
    from headrace.review.recompute import PlainModel

    logging.disable_progress_bar()
    found = check(Path(run_dir), PlainModel, samples=samples, seed=seed, tolerance=tolerance)
    if not found.compared and not found.problems and not as_json:
        # A table without a single comparison says nothing.
        raise UserError(f"{run_dir}: nothing could be checked ({found.recorded:,} rollouts recorded); {HINT}")
    # msgspec writes an error that is not finite as null, because JSON has no infinity.
    encoded = msgspec.json.format(msgspec.json.encode(found.as_dict()), indent=2).decode()
    typer.echo(encoded if as_json else describe_audit(found))
    if found.problems:
        typer.echo(f"headrace: {run_dir}: {len(found.problems)} found wrong, the first: {found.problems[0]}", err=True)
        raise typer.Exit(1)
    if not found.compared:
        raise UserError(f"{run_dir}: nothing could be checked ({found.recorded:,} rollouts recorded); {HINT}")


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
        typer.echo(f"headrace: {run_dir}: the replayed weights differ from the published ones", err=True)
        raise typer.Exit(1)


def stall(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Print what every loop and process of a live run waits for, and since when. Fails if no run is live there."""
    # A run removes `status.json` when it ends, and the command then fails with one line. A controller that hangs or was
    # killed leaves an old file, and the report says so.
    from headrace.pipeline.waits import describe, read_status

    status = read_status(run_dir)
    typer.echo(msgspec.json.encode(status).decode() if as_json else describe(status))


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
    from headrace.buffer.reader import open_readonly
    from headrace.config.stores import is_url
    from headrace.run_dir import RunDir
    from headrace.training.checkpoints.remote_store import fetch_missing

    paths, config = RunDir.open(run_dir)
    if is_url(config.training.checkpoint_directory):
        with open_readonly(paths.journal) as journal:
            wanted = checkpoint or journal.newest_checkpoint()
        if wanted is not None:
            fetch_missing(config, paths.checkpoints, wanted)
    chosen = _choose(paths.checkpoints, checkpoint)
    from transformers.utils import logging

    from headrace.training.checkpoints.export import export_checkpoint

    logging.disable_progress_bar()
    written = export_checkpoint(chosen, Path(out) if out is not None else paths.path / f"export-{to}", to)
    found = {"checkpoint": chosen.name, "format": to, "directory": str(written)}
    typer.echo(json.dumps(found) if as_json else f"{chosen.name} as {to} in {written}")


def convert(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Write checkpoints anew that an older version wrote with several ranks, as shards with a pickled index."""
    from headrace.buffer.store import lock_run
    from headrace.run_dir import RunDir
    from headrace.training.checkpoints.base import pickled

    paths, _ = RunDir.open(run_dir)
    old = pickled(paths.checkpoints)
    kept: dict[str, str] = {}
    if old:
        from headrace.training.checkpoints.convert import convert_checkpoint

        typer.echo("the pickled index is read without executing anything in it", err=True)
        with lock_run(paths.journal):
            kept = {checkpoint.name: convert_checkpoint(checkpoint).name for checkpoint in old}
    lines = [f"{name} is written anew in safetensors; the old one is kept as {aside}" for name, aside in kept.items()]
    typer.echo(json.dumps(kept) if as_json else "\n".join(lines) or f"{paths.path}: no checkpoint has to be converted")


def _choose(checkpoints: Path, name: str | None) -> Path:
    """Return the checkpoint with this name, or the newest whole one. Newer ones that are damaged are named."""
    from headrace.training.checkpoints.base import by_name, incomplete, latest

    known, broken = by_name(checkpoints), incomplete(checkpoints)
    if name is None:
        newest = latest(checkpoints)
        damaged = [f"{other}: {damage}" for other, damage in broken.items() if newest is None or other > newest.name]
        if newest is None:
            raise UserError("; ".join(damaged) or f"{checkpoints.parent} has no checkpoint yet")
        for line in damaged:
            typer.echo(f"{line}; {newest.name} is taken", err=True)
        return newest
    if name in broken:
        raise UserError(f"--checkpoint {name}: {broken[name]}")
    if name not in known:
        raise UserError(f"--checkpoint {name}: there is none of this name; there are {', '.join(known) or 'none'}")
    return known[name]

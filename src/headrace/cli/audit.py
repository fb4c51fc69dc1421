"""`headrace audit`: compares recorded log-probabilities with plain Hugging Face under the checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from headrace.cli.options import AsJson, RunPath
from headrace.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(audit)


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
    typer.echo(_json(found.as_dict()) if as_json else describe_audit(found))
    if found.problems:
        raise typer.Exit(1)
    if not found.compared:
        raise UserError(f"{run_dir}: nothing could be checked ({found.recorded:,} rollouts recorded); {HINT}")


def _json(found: dict[str, Any]) -> str:
    # An error that is not finite becomes null here, because JSON has no infinity.
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode()

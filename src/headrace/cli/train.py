"""`headrace train` starts a run, `headrace resume` continues one, `headrace gateway` takes agents from outside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from headrace.cli.options import AsJson, ConfigPath, RunPath, Settings
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.pipeline.launch import RunSession

INTERRUPTED = 130


def train(config: ConfigPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Train a model as CONFIG says."""
    from rich.console import Console

    from headrace.config import load_config
    from headrace.observe.progress import make_progress
    from headrace.pipeline.launch import start_run

    loaded = load_config(config, settings or [])
    progress = make_progress(loaded.observe.display, Console(stderr=as_json), title=loaded.run.name)
    end(start_run(loaded, progress), as_json)


def resume(run_dir: RunPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Continue a run from its newest checkpoint."""
    from rich.console import Console

    from headrace.observe.progress import make_progress
    from headrace.pipeline.launch import resume_run

    end(resume_run(run_dir, make_progress("auto", Console(stderr=as_json)), settings or []), as_json)


def gateway(config: ConfigPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Train with agents from outside, as CONFIG says: serve OpenAI's API and offer sessions at POST /v1/sessions."""
    import msgspec
    from rich.console import Console

    from headrace.config import AgentTaskConfig, load_config
    from headrace.observe.progress import make_progress
    from headrace.pipeline.launch import start_run

    loaded = load_config(config, settings or [])
    if not isinstance(loaded.task, AgentTaskConfig):
        kind = type(loaded.task).__struct_config__.tag
        raise UserError(f'headrace gateway needs [task] kind = "agent", not "{kind}"')
    task = msgspec.structs.replace(loaded.task, agent=None, command=[])
    loaded = msgspec.structs.replace(loaded, task=task)
    progress = make_progress(loaded.observe.display, Console(stderr=as_json), title=loaded.run.name)
    end(start_run(loaded, progress), as_json)


def end(outcome: RunSession, as_json: bool) -> None:
    """Report how a run ended, and exit with the matching code."""
    from headrace.observe.summary import describe

    typer.echo(json.dumps(outcome.summary, indent=2) if as_json else describe(outcome.summary))
    if not as_json:
        typer.echo(f"report: {outcome.run_dir.report}")
    if outcome.outcome == "interrupted":
        typer.echo(f"interrupted; go on with: headrace resume {outcome.run_dir.path}", err=True)
        raise typer.Exit(INTERRUPTED)

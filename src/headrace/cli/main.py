"""The `headrace` program: its commands, of which those that run the whole loop are here, and how they end.

Exit codes: 0 done, 1 the run failed, 2 a mistake of the user's (one line says which), 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

from headrace.cli import AsJson, ConfigPath, RunPath, Settings, bench, check, generate, review
from headrace.errors import HeadraceError, PeerDied, UserError

if TYPE_CHECKING:
    from headrace.config import Config
    from headrace.pipeline.launch import RunSession


def train(config: ConfigPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Train a model as CONFIG says."""
    from headrace.config import load_config

    _start(load_config(config, settings or []), as_json)


def resume(run_dir: RunPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Continue a run from its newest checkpoint."""
    from rich.console import Console

    from headrace.observe.progress import make_progress
    from headrace.pipeline.launch import resume_run

    _report(resume_run(run_dir, make_progress("auto", Console(stderr=as_json)), settings or []), as_json)


def gateway(config: ConfigPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Train with agents from outside, as CONFIG says: serve OpenAI's API and offer sessions at POST /v1/sessions."""
    import msgspec

    from headrace.config import AgentTaskConfig, load_config

    loaded = load_config(config, settings or [])
    if not isinstance(loaded.task, AgentTaskConfig):
        kind = type(loaded.task).__struct_config__.tag
        raise UserError(f'headrace gateway needs [task] kind = "agent", not "{kind}"')
    task = msgspec.structs.replace(loaded.task, agent=None, command=[])
    _start(msgspec.structs.replace(loaded, task=task), as_json)


def _start(config: Config, as_json: bool) -> None:
    from rich.console import Console

    from headrace.observe.progress import make_progress
    from headrace.pipeline.launch import start_run

    progress = make_progress(config.observe.display, Console(stderr=as_json), title=config.run.name)
    _report(start_run(config, progress), as_json)


def _report(outcome: RunSession, as_json: bool) -> None:
    """Report how a run ended, and exit with the matching code."""
    from headrace.observe.summary import describe

    typer.echo(json.dumps(outcome.summary, indent=2) if as_json else describe(outcome.summary))
    if not as_json:
        typer.echo(f"report: {outcome.run_dir.report}")
    if outcome.outcome == "interrupted":
        typer.echo(f"interrupted; go on with: headrace resume {outcome.run_dir.path}", err=True)
        raise typer.Exit(130)


app = typer.Typer(
    help="Asynchronous RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train)
app.command()(resume)
app.command()(check.check)
app.command()(gateway)
app.command()(generate.generate)
bench.register(app)
app.command()(review.report)
app.command()(review.ledger)
app.command()(review.rollouts)
app.command()(review.audit)
app.command()(review.replay)
app.command()(review.stall)
app.command()(review.export)
app.command()(check.doctor)


def main() -> None:
    """Run the program. Headrace's own errors become one line."""
    try:
        app()
    except UserError as error:
        _end(f"headrace: {error}", 2)
    except PeerDied as death:
        _end(f"headrace: {death}" + "".join(f"\n  | {line}" for line in death.last_lines.splitlines()), 1)
    except HeadraceError as error:
        _end(f"headrace: {error}", 1)
    except KeyboardInterrupt:
        _end("headrace: interrupted", 130)


def _end(text: str, code: int) -> None:
    sys.stderr.write(text + "\n")
    sys.exit(code)

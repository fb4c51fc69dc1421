"""`headrace gateway`: starts a run whose agents come from outside."""

from __future__ import annotations

import typer

from headrace.cli.options import AsJson, ConfigPath, Settings
from headrace.cli.train import end
from headrace.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(gateway)


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

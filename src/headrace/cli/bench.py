"""`headrace bench`: measurements of Headrace beside a comparison, in one call.

A command's options are the fields of its class in `bench/options.py`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any, get_type_hints

import msgspec
import typer

from headrace.bench.options import Bench, DeliveryBench, EngineBench, JournalBench, LoopBench, TrainBench
from headrace.bench.report import lines
from headrace.cli import AsJson

BENCHES: dict[str, type[Bench]] = {
    "loop": LoopBench,
    "engine": EngineBench,
    "delivery": DeliveryBench,
    "train": TrainBench,
    "journal": JournalBench,
}
"""The command -> its options. The function `bench_NAME` of the module `headrace.bench.NAME` measures."""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Measure, side by side, in one call.", no_args_is_help=True)
    for name, kind in BENCHES.items():
        group.command(name)(_command(name, kind))
    app.add_typer(group, name="bench")


def _command(name: str, kind: type[Bench]) -> Callable[..., None]:
    """Return the command with these options."""

    def command(as_json: bool, **given: Any) -> None:
        options = kind(**given)
        # Checked before torch is loaded, so that a mistake is reported at once.
        options.check()
        measure = getattr(import_module(f"headrace.bench.{name}"), f"bench_{name}")
        found = measure(options, lambda line: typer.echo(line, err=True))
        typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))

    hints = get_type_hints(kind, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, annotation=hints[field.name], default=_default(field)
        )
        for field in msgspec.structs.fields(kind)
    ]
    parameters.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, annotation=AsJson, default=False))
    command.__doc__ = kind.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _default(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return inspect.Parameter.empty
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()

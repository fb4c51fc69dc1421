"""`headrace bench`: measurements of Headrace beside a comparison, in one call.

A command's options are the fields of its class in `bench/options.py`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any, get_type_hints

import msgspec
import typer

from headrace.bench.options import (
    Bench,
    DeliveryBench,
    EngineBench,
    JournalBench,
    LoopBench,
    TrainBench,
    check_options,
)
from headrace.bench.report import lines
from headrace.cli import AsJson

Measure = Callable[[Any, Callable[[str], None]], dict[str, Any]]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Measure, side by side, in one call.", no_args_is_help=True)
    group.command("loop")(_command(LoopBench, _loop))
    group.command("engine")(_command(EngineBench, _engine))
    group.command("delivery")(_command(DeliveryBench, _delivery))
    group.command("train")(_command(TrainBench, _train))
    group.command("journal")(_command(JournalBench, _journal))
    app.add_typer(group, name="bench")


def _command(kind: type[Bench], find: Callable[[], Measure]) -> Callable[..., None]:
    """Return the command with these options. `find` imports the function that measures."""

    def command(as_json: bool, **given: Any) -> None:
        options = kind(**given)
        # Checked before torch is loaded, so that a mistake is reported at once.
        check_options(options)
        found = find()(options, lambda line: typer.echo(line, err=True))
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


def _loop() -> Measure:
    from headrace.bench.loop import bench_loop

    return bench_loop


def _engine() -> Measure:
    from headrace.bench.engine import bench_engine

    return bench_engine


def _delivery() -> Measure:
    from headrace.bench.delivery import bench_delivery

    return bench_delivery


def _train() -> Measure:
    from headrace.bench.train import bench_train

    return bench_train


def _journal() -> Measure:
    from headrace.bench.journal import bench_journal

    return bench_journal

"""`headrace bench`: measurements, side by side, in one call."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from headrace.cli.options import AsJson


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Measure, side by side, in one call.", no_args_is_help=True)
    group.command("loop")(loop)
    app.add_typer(group, name="bench")


def loop(
    versions: Annotated[int, typer.Option(help="Versions that each run trains.", min=2)] = 30, as_json: AsJson = False
) -> None:
    """The whole loop: depth 0 against depth 2 on one balanced workload, one compute thread a process."""
    from headrace.bench.loop import bench_loop

    found = bench_loop(versions, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    def row(name: str, key: str) -> str:
        run = found[key]
        return (
            f"{name:<28}{run['tokens_per_second']:>9.0f} tok/s   idle: trainer {run['trainer_idle_fraction']:.2f}, "
            f"engine {run['engine_idle_fraction']:.2f}   lag {run['lag_mean']:.2f} (max {run['lag_max']})"
        )

    return [
        f"{found['versions']} versions; training takes {found['training_over_generation']:.2f}x as long as generation",
        row("depth 0", "depth_0"),
        row("depth 2", "depth_2"),
        row("depth 0, two threads a phase", "depth_0_two_threads"),
        f"depth 2 over depth 0: {found['ratio']:.2f}x ({found['ratio_to_two_threads']:.2f}x over two threads a phase)",
    ]

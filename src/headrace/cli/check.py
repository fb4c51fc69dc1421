"""`headrace check`: reports everything that is known about a run before it starts, without loading torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from headrace.cli.options import AsJson, ConfigPath, Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(check)


def check(config: ConfigPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Validate CONFIG. Print it resolved, with the lag bound, the memory, and which side will be the bottleneck."""
    from headrace.buffer.admission import capacity, lag_bound
    from headrace.config import dump_config, load_config
    from headrace.config.estimate import estimate
    from headrace.config.model_dir import model_facts
    from headrace.pipeline.inputs import count_prompts

    loaded = load_config(config, settings or [])
    facts = model_facts(Path(loaded.model.path), loaded.model.weights)
    train_prompts, heldout_prompts = count_prompts(loaded)
    buffer, every = loaded.buffer, loaded.delivery.publish_every
    found: dict[str, Any] = {
        "lag_bound": lag_bound(buffer.depth, buffer.groups, every, buffer.max_lag),
        "slots": capacity(buffer.depth, buffer.groups, every, buffer.max_lag),
        "on_stale": buffer.on_stale if buffer.max_lag is not None else None,
        "train_prompts": train_prompts,
        "heldout_prompts": heldout_prompts,
        **estimate(loaded, facts),
    }
    if as_json:
        import msgspec

        typer.echo(json.dumps({"config": msgspec.to_builtins(loaded), **found}, indent=2))
        return
    typer.echo(dump_config(loaded))
    for line in _lines(found):
        typer.echo(line)


def _slow(on_stale: str | None) -> str:
    """Return what happens to slow groups, if they could come too late."""
    happens = {"wait": "batches wait for slow groups", "drop": "slow groups are dropped"}
    return "" if on_stale is None else f"; {happens.get(on_stale, 'slow groups begin again from their tokens')}"


def _trainer(found: dict[str, Any]) -> str:
    memory, ranks = found["memory_bytes"], found["trainer_ranks"]
    text = f"{'trainer' if ranks == 1 else f'each of {ranks} trainer ranks'} {memory['trainer'] / 1e9:.2f} GB"
    return text + (f" and {memory['offloaded'] / 1e9:.2f} GB offloaded" if memory["offloaded"] else "")


def _lines(found: dict[str, Any]) -> list[str]:
    memory = found["memory_bytes"]
    return [
        f"model       {found['architecture']}, {found['parameters'] / 1e6:.1f}M parameters",
        f"prompts     {found['train_prompts']} to train on, {found['heldout_prompts']} held out",
        f"lag         at most {found['lag_bound']} versions; {found['slots']} groups under way"
        f"{_slow(found['on_stale'])}",
        f"memory      {_trainer(found)}, each engine {memory['engine'] / 1e9:.2f} GB, "
        f"shared {memory['shared'] / 1e9:.2f} GB",
        f"bottleneck  {found['bottleneck']} (an estimate: generation {found['generation_seconds']:.2g} s, "
        f"training {found['training_seconds']:.2g} s a version)",
    ]

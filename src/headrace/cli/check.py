"""`headrace check` and `headrace doctor`: what is known about a run, and about this machine, before a run starts.

`check` does not load torch.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import typer

from headrace.cli import AsJson, ConfigPath, Settings

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "safetensors", "msgspec", "pyzmq", "numpy", "reasoning-gym")


def check(config: ConfigPath, settings: Settings = None, as_json: AsJson = False) -> None:
    """Validate CONFIG. Print it resolved, with the lag bound, the memory, and which side will be the bottleneck."""
    from headrace.buffer.admission import capacity, lag_bound
    from headrace.config import dump_config, load_config
    from headrace.config.memory import estimate
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


def _lines(found: dict[str, Any]) -> list[str]:
    size = {name: f"{number / 1e9:.2f} GB" for name, number in found["memory_bytes"].items()}
    trainer = "trainer" if found["trainer_ranks"] == 1 else f"each of {found['trainer_ranks']} trainer ranks"
    offloaded = f" and {size['offloaded']} offloaded" if found["memory_bytes"]["offloaded"] else ""
    slow = {
        None: "",
        "wait": "; batches wait for slow groups",
        "drop": "; slow groups are dropped",
        "salvage": "; slow groups are started again and keep their tokens",
    }[found["on_stale"]]
    return [
        f"model       {found['architecture']}, {found['parameters'] / 1e6:.1f}M parameters",
        f"prompts     {found['train_prompts']} to train on, {found['heldout_prompts']} held out",
        f"lag         at most {found['lag_bound']} versions; {found['slots']} groups under way{slow}",
        f"memory      {trainer} {size['trainer']}{offloaded}, each engine {size['engine']}, shared {size['shared']}",
        f"bottleneck  {found['bottleneck']} (an estimate: generation {found['generation_seconds']:.2g} s, "
        f"training {found['training_seconds']:.2g} s a version)",
    ]


def doctor(as_json: AsJson = False) -> None:
    """Report what this machine has and which paths a run will use."""
    import torch

    from headrace.config.schema import DeliveryConfig
    from headrace.delivery.setup import choose

    cuda = torch.cuda.is_available()
    shm = Path("/dev/shm")
    device = "cuda" if cuda else "cpu"
    choice = choose(DeliveryConfig(), shm, trainer=device, engines=device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, dict[str, Any]] = {
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "python": sys.version.split()[0],
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": f"{memory / 1e9:.1f} GB",
            "shared memory": f"{shutil.disk_usage(shm).free / 1e9:.1f} GB free" if shm.is_dir() else "none",
            "gpu": torch.cuda.get_device_name(0) if cuda else "none",
        },
        "packages": {name: _version(name) for name in PACKAGES},
        "paths": {
            "engine": "embedded, GPU: Triton kernels, captured steps, compiled layers"
            if cuda
            else "embedded, CPU: paged attention in plain torch",
            "weights": f"{choice.transport}: {choice.why}; others: [delivery] transport",
            "training": "one process, packed sequences, "
            + ("GPU: float32 masters, bfloat16 passes, compiled layers" if cuda else "CPU: float32"),
            "threads": f"{torch.get_num_threads()} by default; [engine] threads and [training] threads decide",
        },
    }
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for section, facts in found.items():
        typer.echo(section)
        for name, value in facts.items():
            typer.echo(f"  {name:<16} {value}")


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed" + (' (pip install "headrace[tasks]")' if package == "reasoning-gym" else "")

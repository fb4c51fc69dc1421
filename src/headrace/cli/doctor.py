"""`headrace doctor`: reports what this machine has, and which paths a run will take on it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import typer

from headrace.cli.options import AsJson
from headrace.config.schema import DeliveryConfig
from headrace.delivery.setup import choose

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "safetensors", "msgspec", "pyzmq", "numpy", "reasoning-gym")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(as_json: AsJson = False) -> None:
    """Report what this machine has and which paths a run will use."""
    found = examine()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for section, facts in found.items():
        typer.echo(section)
        for name, value in facts.items():
            typer.echo(f"  {name:<16} {value}")


def examine() -> dict[str, dict[str, Any]]:
    """Return facts about the machine, the installed packages, and the choices that follow."""
    import torch

    cuda = torch.cuda.is_available()
    shm = Path("/dev/shm")
    device = "cuda" if cuda else "cpu"
    choice = choose(DeliveryConfig(), shm, trainer=device, engines=device)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
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


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed" + (' (pip install "headrace[tasks]")' if package == "reasoning-gym" else "")

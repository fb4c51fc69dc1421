"""`headrace doctor`: what this machine has, and what a run would do with it. `--gpus` tests that by real runs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli import AsJson, Settings
from headrace.errors import UserError

if TYPE_CHECKING:
    from headrace.cluster.placement import Host, Placement

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "safetensors", "msgspec", "pyzmq", "numpy", "reasoning-gym")

RunTest = Annotated[bool, typer.Option("--gpus", help="Test the GPUs: a short real run for each transport.")]
OnCpu = Annotated[bool, typer.Option("--cpu", help="With --gpus: make the same runs on CPUs.")]


def doctor(settings: Settings = None, gpus: RunTest = False, cpu: OnCpu = False, as_json: AsJson = False) -> None:
    """Report what this machine has and which paths a run will use. With --gpus, test them. Exit code 1 if one failed.

    --set changes the run that is placed here, such as --set engine.gpus=0-5 --set training.gpus=6-7.
    """
    if gpus:
        from headrace.cli.self_test import self_test

        self_test(settings or [], on_cpu=cpu, as_json=as_json)
        return
    if cpu:
        raise UserError("--cpu goes together with --gpus")
    found = {**_found(), "gpus": _places(settings or [])}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for section, facts in found.items():
        typer.echo(section)
        for name, value in facts.items():
            typer.echo(f"  {name:<16} {value}")


def _found() -> dict[str, dict[str, Any]]:
    import torch

    from headrace.config.schema import DeliveryConfig
    from headrace.delivery.setup import choose

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


def _places(settings: Sequence[str]) -> dict[str, str]:
    """Place a run with these settings. The model is not known, so both sides are taken to be equally fast."""
    from headrace.cluster.launchers.local import hosts_of
    from headrace.cluster.placement import place
    from headrace.config import make_config

    config = make_config({"model": {"path": ""}, "task": {"kind": "environment", "factory": "task:Task"}}, settings)
    hosts = hosts_of(config)
    return gpu_lines(hosts, place(config, hosts))


def gpu_lines(hosts: Sequence[Host], placement: Placement) -> dict[str, str]:
    """Return a line for each GPU, by the index that `gpus` of [engine] and [training] takes, and one for each worker.

    Without GPUs there is only one line, which says so.
    """
    from headrace.cluster.inventory import describe

    found = {}
    for host in hosts:
        for index, gpu in enumerate(host.gpus):
            memory = f"{gpu.memory / 2**30:.1f} GiB" if gpu.memory else "memory not known"
            named = ", ".join(filter(None, [f"GPU {gpu.id}", gpu.name, memory]))
            found[f"{host.name}:{index}" if len(hosts) > 1 else str(index)] = named
    return {**found, **describe(placement)} if found else {"visible": "none"}

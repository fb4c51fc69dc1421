"""`headrace launch`: a run as a job of Slurm, of Kubernetes or of a cloud."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli import ConfigPath, Settings
from headrace.errors import UserError

SUBMIT = {"kubernetes": "kubectl create -f", "skypilot": "sky launch"}
"""How the file of a recipe is submitted, where Headrace does not do it."""


def launch(
    config: ConfigPath,
    settings: Settings = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="A script for sbatch.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="A RayJob for KubeRay.")] = False,
    skypilot: Annotated[bool, typer.Option("--skypilot", help="A task for SkyPilot.")] = False,
    nodes: Annotated[int | None, typer.Option(help="The number of nodes.", min=1)] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="The GPUs of each node.", min=0)] = None,
    cpus_per_node: Annotated[int | None, typer.Option(help="The cores of each node (Slurm: all).", min=1)] = None,
    time: Annotated[str | None, typer.Option(help="The time limit, such as 02:30:00 or 1-12.")] = None,
    partition: Annotated[str | None, typer.Option(help="Slurm: the partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm: the account.")] = None,
    image: Annotated[str | None, typer.Option(help="The container image (Slurm: with the plugin pyxis).")] = None,
    output: Annotated[str | None, typer.Option(help="Write the recipe to this file, and submit nothing.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the recipe, and submit nothing.")] = False,
) -> None:
    """Start the run of CONFIG as a job on the nodes of a cluster. The numbers of nodes and GPUs follow from CONFIG."""
    from headrace.cluster.recipes import render
    from headrace.cluster.recipes.job import Options, make_job
    from headrace.config import load_config

    kinds = {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot}
    chosen = [kind for kind, wanted in kinds.items() if wanted]
    if len(chosen) != 1:
        raise UserError("headrace launch needs one of --slurm, --kubernetes and --skypilot")
    options = Options(
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        time=time,
        partition=partition,
        account=account,
        image=image,
    )
    job = make_job(load_config(config, settings or []), config, settings or [], options)
    recipe = {"slurm": render.sbatch, "kubernetes": render.rayjob, "skypilot": render.skypilot}[chosen[0]](job)
    if output is not None:
        _write(output, recipe)
    elif dry_run:
        typer.echo(recipe, nl=False)
    elif chosen[0] in SUBMIT:
        raise UserError(f"--{chosen[0]}: write the file with --output FILE, then submit it: {SUBMIT[chosen[0]]} FILE")
    else:
        _submit(recipe)


def _write(output: str, recipe: str) -> None:
    try:
        Path(output).write_text(recipe)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from error


def _submit(script: str) -> None:
    """Give a script to Slurm, and print its answer, which has the number of the job."""
    if shutil.which("sbatch") is None:
        raise UserError("there is no program `sbatch` here: run this where Slurm is, or print the script: --dry-run")
    done = subprocess.run(["sbatch"], input=script, text=True, capture_output=True, check=False)
    if done.returncode:
        raise UserError(f"sbatch: {done.stderr.strip()}")
    typer.echo(done.stdout.strip())

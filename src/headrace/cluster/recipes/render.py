"""The recipes as texts: an sbatch script, a RayJob and a SkyPilot task, from the templates beside this file."""

import json
import shlex
from functools import cache
from pathlib import Path

import jinja2

from headrace.cluster.recipes.job import Job
from headrace.errors import UserError

IMAGE = "headrace:latest"
"""The image that is used if none is given: the one that `deploy/Dockerfile` makes."""
OBJECT_STORE_BYTES = 100 << 20
"""The size of Ray's object store. A run stores nothing there; by default Ray would reserve a third of the memory."""


def sbatch(job: Job) -> str:
    """Return a script for `sbatch`."""
    return _render("sbatch.sh.jinja", job)


def rayjob(job: Job) -> str:
    """Return a RayJob for KubeRay, as YAML."""
    _refuse_names(job, "Kubernetes")
    return _render("rayjob.yaml.jinja", job)


def skypilot(job: Job) -> str:
    """Return a task for SkyPilot, as YAML."""
    _refuse_names(job, "SkyPilot")
    return _render("skypilot.yaml.jinja", job)


def _refuse_names(job: Job, where: str) -> None:
    if job.named:
        raise UserError(
            f"the configuration names the node {job.named[0]!r}, and {where} names nodes by itself: leave [cluster] "
            "hosts out, and give `gpus` as numbers"
        )


def _render(template: str, job: Job) -> str:
    values = {"job": job, "options": job.options, "image": job.options.image or IMAGE}
    return _templates().get_template(template).render(values, object_store=OBJECT_STORE_BYTES)


@cache
def _templates() -> jinja2.Environment:
    # Not HTML: every value passes through `sh` or `yaml`, or cannot hold a special character.
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=False,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        comment_start_string="{##",  # `{#` is in `${#array[@]}`.
        keep_trailing_newline=True,
    )
    found.filters["sh"] = lambda value: shlex.quote(str(value))
    found.filters["yaml"] = lambda value: json.dumps(str(value), ensure_ascii=False)
    return found

"""What must start at once does so without torch, and the public surface is what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from runs import QUICKSTART, ROOT

import headrace

PUBLIC = [
    "Batch", "ChatFormat", "Config", "Delta", "EmbeddedEngine", "Engine", "Environment",
    "EnvironmentStep", "FakeEngine", "Group", "HeadraceError", "Judgement", "Manifest", "Prompt", "Proof", "Publisher",
    "Request", "Rollout", "Run", "Sampling", "ShmSender", "Task", "Trace", "Trainer", "UserError", "Version", "Window",
    "assemble", "load_config", "load_model", "make_config", "train",
]  # fmt: skip

FREE = [
    "headrace", "headrace.types", "headrace.errors", "headrace.channel.hub", "headrace.config", "headrace.tasks.gym",
    "headrace.tasks.calculator", "headrace.engines.base", "headrace.engines.fake", "headrace.engines.serving",
    "headrace.rollouts.groups", "headrace.scoring.rewards", "headrace.buffer.journal", "headrace.algorithms.assemble",
    "headrace.training.remote", "headrace.delivery.base", "headrace.pipeline.launch", "headrace.review.summary",
    "headrace.api", "headrace.review.audit", "headrace.review.rollouts", "headrace.cli.main",
]  # fmt: skip


def loaded_by(code: str) -> list[str]:
    """Heavy packages that a fresh interpreter has loaded after running this."""
    heavy = "[name for name in ('torch', 'transformers', 'reasoning_gym', 'peft') if name in sys.modules]"
    script = f"import sys\n{code}\nsys.stderr.write(repr({heavy}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return eval(done.stderr.strip().splitlines()[-1])  # noqa: S307 - our own repr of a list of names


@pytest.mark.parametrize("module", FREE)
def test_modules_import_without_torch(module: str) -> None:
    assert loaded_by(f"import {module}") == []


@pytest.mark.parametrize("arguments", [["--help"], ["check", str(QUICKSTART)], ["check", str(QUICKSTART), "--json"]])
def test_commands_answer_without_torch(arguments: list[str]) -> None:
    code = f"""
sys.argv = ["headrace", *{arguments!r}]
from headrace.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
    assert loaded_by(code) == []


def test_the_public_surface_is_pinned() -> None:
    assert headrace.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(headrace, name) is not None
    with pytest.raises(AttributeError):
        headrace.nothing  # noqa: B018

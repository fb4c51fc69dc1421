"""The commands of the README with an installed wheel, in a directory outside the checkout.

`make wheel` runs this program: `python tests/installed_wheel.py VENV DIST`. VENV is an environment with nothing but the
wheel and what it depends on. DIST holds the wheel and the source distribution.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICKSTART = "examples/quickstart/quickstart.toml"
SMALL = (
    "run.versions=2", "warm_start.steps=4", "warm_start.batch=8", "rollouts.group_size=2", "buffer.groups=4",
    "evaluate.prompts=4", "evaluate.every=0",
)  # fmt: skip
FROM_PYTHON = """
import re
import headrace
assert {checkout!r} not in headrace.__file__, headrace.__file__
prompts = [{{"prompt": f"{{a}}{{b}}", "answer": f"{{a}}"}} for a in "abcd" for b in "efgh"]
run = headrace.train(
    model={{"path": "examples/quickstart/model", "weights": "random"}}, prompts=prompts,
    reward=lambda completion, answer: float(completion == answer), run={{"versions": 2}}, display="none",
    rollouts={{"group_size": 2, "max_tokens": 8}}, buffer={{"groups": 2}}, engine={{"max_length": 64}},
)
assert run.summary["outcome"] == "finished" and run.model_dir.is_dir()
"""
DATA = """
from importlib.resources import files
for name in {names!r}:
    assert files("headrace").joinpath(name).is_file(), name
"""


def main(venv: Path, dist: Path) -> None:
    """Run every command, and say how long each takes."""
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", QUICKSTART, "src/headrace/buffer/schema.sql"} <= inside
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = project["tool"]["setuptools"]["package-data"]["headrace"]
    settings = [word for setting in SMALL for word in ("--set", setting)]
    headrace, python = str(venv / "bin/headrace"), str(venv / "bin/python")
    with tempfile.TemporaryDirectory() as directory:
        for command in (
            [headrace, "--help"],
            [python, "-c", DATA.format(names=names)],
            [headrace, "examples"],
            [headrace, "doctor"],
            [headrace, "check", QUICKSTART],
            [headrace, "train", QUICKSTART, *settings],
            [headrace, "ledger", "runs/quickstart"],
            [headrace, "report", "runs/quickstart"],
            [headrace, "rollouts", "runs/quickstart", "--text", "--limit", "2"],
            [headrace, "export", "runs/quickstart", "--to", "hf", "--out", "model"],
            [headrace, "launch", QUICKSTART, "--slurm", "--dry-run"],
            [python, "-c", FROM_PYTHON.format(checkout=str(ROOT / "src"))],
        ):
            run(command, Path(directory))
        assert (Path(directory) / "runs/quickstart/report.html").is_file()
        assert (Path(directory) / "model/model.safetensors").is_file()


def run(command: list[str], directory: Path) -> None:
    """Run one command without anything of the checkout in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    begun = time.monotonic()
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    said = " ".join(Path(word).name if word == command[0] else word.strip().splitlines()[0] for word in command[:3])
    assert done.returncode == 0, f"{said}:\n{done.stdout}\n{done.stderr}"
    print(f"{time.monotonic() - begun:6.1f} s  {said}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())

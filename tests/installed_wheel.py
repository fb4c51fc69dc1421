"""The commands of the README with an installed wheel, in a directory outside the checkout.

`make wheel` runs this program: `python tests/installed_wheel.py VENV DIST`. VENV is an environment with nothing but the
wheel and what it depends on. DIST holds the wheel and the source distribution.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

from doc_blocks import BLOCKS, ROOT, SHELL, shell_lines

QUICKSTART = "examples/quickstart/quickstart.toml"
MODEL = "path/to/model"
"""Where the README expects the reader's model. Here it is what the quickstart has trained."""
SMALL = (
    "run.versions=2", "rollouts.group_size=2", "rollouts.max_tokens=8", "buffer.groups=4", "engine.max_length=64",
    "evaluate.prompts=4", "evaluate.every=0",
)  # fmt: skip
SMALL_QUICKSTART = (*SMALL, "warm_start.steps=4", "warm_start.batch=8")
FROM_PYTHON = f"""
import headrace
assert {str(ROOT / "src")!r} not in headrace.__file__, headrace.__file__
run = headrace.train(
    model={MODEL!r}, prompts=[{{"prompt": f"{{a}}{{b}}", "answer": a}} for a in "abcd" for b in "efgh"],
    reward=lambda completion, answer: float(completion == answer), run={{"versions": 2}}, display="none",
    rollouts={{"group_size": 2, "max_tokens": 8}}, buffer={{"groups": 2}}, engine={{"max_length": 64}},
)
assert run.summary["outcome"] == "finished" and run.model_dir.is_dir()
"""
PACKAGED = """
import sys
from importlib.resources import files
for name in sys.argv[1:]:
    assert files("headrace").joinpath(name).is_file(), name
"""


def main(venv: Path, dist: Path) -> None:
    """Look into the source distribution, then run every command with the wheel, and print how long each takes."""
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", QUICKSTART, "src/headrace/buffer/schema.sql"} <= inside
    with tempfile.TemporaryDirectory() as home:
        write_what_a_reader_has(Path(home))
        for command in commands():
            run(command, venv / "bin", Path(home))
        for made in ("runs/quickstart/report.html", "first-model/model.safetensors"):
            assert (Path(home) / made).is_file(), made


def write_what_a_reader_has(home: Path) -> None:
    """Write the files of the README's blocks, and prompts."""
    for block in BLOCKS:
        if block.page == "README.md" and block.file:
            (home / block.file).write_text(block.text)
    prompts = [{"prompt": f"{a}{b}", "answer": a} for a in "abcd" for b in "efgh"]
    (home / "train.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


def commands() -> list[list[str]]:
    """Return the commands: those of the README's blocks, and some of its table of commands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packaged = project["tool"]["setuptools"]["package-data"]["headrace"]
    return [
        ["headrace", "--help"],
        ["python", "-c", PACKAGED, *packaged],
        ["headrace", "examples"],
        ["headrace", "doctor"],
        ["headrace", "check", QUICKSTART],
        ["headrace", "train", QUICKSTART, *set_each(SMALL_QUICKSTART)],
        ["headrace", "ledger", "runs/quickstart"],
        ["headrace", "report", "runs/quickstart"],
        ["headrace", "rollouts", "runs/quickstart", "--text", "--limit", "2"],
        ["headrace", "export", "runs/quickstart", "--to", "hf", "--out", MODEL],
        ["headrace", "launch", QUICKSTART, "--slurm", "--gpus-per-node", "0", "--dry-run"],
        *commands_of_readme(),
        ["python", "-c", FROM_PYTHON],
    ]


def commands_of_readme() -> list[list[str]]:
    """Return the commands of Headrace in the README's blocks, with settings that make their runs small."""
    blocks = [block for block in BLOCKS if block.page == "README.md" and block.kind in SHELL]
    lines = [shlex.split(line, comments=True) for block in blocks for line in shell_lines(block.text)]
    found = [words for words in lines if words[0] == "headrace"]
    assert {"train", "check", "resume", "export"} <= {words[1] for words in found}
    for words in found:
        if QUICKSTART in words:
            words += set_each(SMALL_QUICKSTART)
        elif words[1] in ("check", "train"):
            words += set_each((*SMALL, f"model.path={MODEL}"))
        elif words[1] == "resume":
            words += set_each(("run.versions=3",))
    return found


def set_each(settings: Iterable[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def run(command: list[str], programs: Path, home: Path) -> None:
    """Run one command without anything of the checkout in its environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    said = " ".join(word for word in command[:3] if "\n" not in word)
    begun = time.monotonic()
    done = subprocess.run(
        [str(programs / command[0]), *command[1:]], cwd=home, env=environment, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{said}:\n{done.stdout}\n{done.stderr}"
    print(f"{time.monotonic() - begun:6.1f} s  {said}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())

"""What is attacked: small real runs, made once, and a model directory. Each attack works on a copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
SMALL = (
    "run.name=run", "run.versions=3", "warm_start.steps=2", "warm_start.batch=8", "rollouts.group_size=4",
    "rollouts.max_tokens=12", "buffer.groups=4", "engine.slots=16", "evaluate.prompts=8", "evaluate.every=0",
    "observe.display=none", "training.checkpoint_every=1",
)  # fmt: skip
LORA = ("lora.rank=4",)
RANKS = ("training.ranks=2",)


class Targets:
    """The originals, under one directory. Each is made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._copies = 0

    @cached_property
    def run(self) -> Path:
        """A run of three versions with a checkpoint of each."""
        return self._train("plain")

    @cached_property
    def adapter_run(self) -> Path:
        """The same with a LoRA adapter."""
        return self._train("adapter", *LORA)

    @cached_property
    def sharded_run(self) -> Path:
        """The same with two trainer ranks."""
        return self._train("sharded", *RANKS)

    @cached_property
    def model(self) -> Path:
        """A whole model directory with weights: the run's last checkpoint, exported."""
        out = self.directory / "model"
        self._headrace("export", str(self.run), "--to", "hf", "--out", str(out))
        return out

    def copy(self, original: Path) -> Path:
        """Return a fresh copy, to be damaged."""
        self._copies += 1
        path = self.directory / f"copy-{self._copies}" / original.name
        shutil.copytree(original, path)
        return path

    def discard(self, path: Path) -> None:
        """Remove a copy."""
        shutil.rmtree(path.parent, ignore_errors=True)

    def _train(self, name: str, *settings: str) -> Path:
        chosen = [*SMALL, f"run.directory={self.directory / name}", *settings]
        self._headrace("train", str(QUICKSTART), *(word for setting in chosen for word in ("--set", setting)))
        return self.directory / name / "run"

    def _headrace(self, *arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "headrace", *arguments], cwd=ROOT, check=True, capture_output=True)

"""What is attacked: small real runs, made once, and a model directory. Each attack works on a copy."""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from victims import ROOT, count, set_all

QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
AGENT = ROOT / "examples/agent/agent.toml"
PROMPTS = ROOT / "examples/agent/train.jsonl"
"""Short prompts, which the quickstart's reward judges too, and which a run learns within 20 versions."""
HELDOUT = ROOT / "examples/agent/heldout.jsonl"
SMALL = (
    "run.name=run", "run.versions=3", "warm_start.steps=2", "warm_start.batch=8", "rollouts.group_size=4",
    "rollouts.max_tokens=12", "buffer.groups=4", "engine.slots=16", "evaluate.prompts=8", "evaluate.every=0",
    "observe.display=none", "training.checkpoint_every=1", f"task.path={PROMPTS}", f"task.heldout_path={HELDOUT}",
)  # fmt: skip
LORA = ("lora.rank=4",)
RANKS = ("training.ranks=2",)
SECONDS = 300.0


class Targets:
    """The originals, under one directory. Each is made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._copies = itertools.count()

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
    def killed_run(self) -> Path:
        """A run whose controller was killed after its second step: its journal has a write-ahead log."""
        path = self.directory / "killed" / "run"
        chosen = (*SMALL, f"run.directory={path.parent}", "run.versions=1000")
        command = [sys.executable, "-m", "headrace", "train", str(QUICKSTART), *set_all(*chosen)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + SECONDS
        try:
            while count(path, "SELECT count(*) FROM steps WHERE objective = 'policy'") < 2:
                assert process.poll() is None and time.monotonic() < deadline, "the run to be killed made no step"
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return path

    @cached_property
    def model(self) -> Path:
        """A whole model directory with weights: the run's last checkpoint, exported."""
        return self._export(self.run, "hf", "model")

    @cached_property
    def adapter(self) -> Path:
        """An adapter as peft reads it: the last checkpoint of the run with an adapter, exported."""
        return self._export(self.adapter_run, "peft", "peft")

    def make(self, kinds: Collection[str]) -> None:
        """Make what attacks of these kinds need now, so that attacks in several threads find them."""
        runs = {"run", "adapter_run", "sharded_run", "killed_run"} if {"run", "resume"} & set(kinds) else set()
        exports = {"model", "adapter"} if {"prompts", "model"} & set(kinds) else set()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.__getattribute__, sorted(runs)))
            list(pool.map(self.__getattribute__, sorted(exports)))

    @contextmanager
    def fresh(self, original: Path | None = None) -> Iterator[Path]:
        """Give a new directory, or a copy of this one, to be damaged. It is removed afterwards."""
        directory = self.directory / f"copy-{next(self._copies)}"
        path = directory / (original.name if original is not None else "new")
        try:
            if original is None:
                path.mkdir(parents=True)
            else:
                shutil.copytree(original, path)
            yield path
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _train(self, name: str, *settings: str) -> Path:
        self._headrace("train", str(QUICKSTART), *set_all(*SMALL, f"run.directory={self.directory / name}", *settings))
        return self.directory / name / "run"

    def _export(self, run: Path, kind: str, name: str) -> Path:
        self._headrace("export", str(run), "--to", kind, "--out", str(self.directory / name))
        return self.directory / name

    def _headrace(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "headrace", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, f"{arguments[0]} for the attack suite failed: {done.stderr[-2000:]}"

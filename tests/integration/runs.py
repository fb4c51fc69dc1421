"""Small real runs for tests: the quickstart's model and data, cut down to seconds."""

from __future__ import annotations

import atexit
import functools
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from command_server import CommandServer
from transformers import AutoModelForCausalLM

from headrace import Run
from headrace.config import Config, load_config
from headrace.types import NO_VERSION

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
NAME = "run"
SMALL = (
    "run.versions=4",
    "warm_start.steps=2",
    "warm_start.batch=8",
    "rollouts.group_size=4",
    "rollouts.max_tokens=12",
    "buffer.groups=4",
    "engine.slots=16",
    "evaluate.prompts=12",
    "evaluate.every=0",
    "observe.display=none",
)


def small_settings(directory: Path, *more: str) -> list[str]:
    """Settings that make the quickstart a run of seconds, in `directory`."""
    return [*SMALL, f"run.directory={directory}", f"run.name={NAME}", *more]


def small_config(directory: Path, *more: str) -> Config:
    return load_config(QUICKSTART, small_settings(directory, *more))


NEW_PROCESS = ("train", "resume", "gateway")
"""Commands that load no torch themselves, and may be told by their environment to load `stops/sitecustomize.py`."""


@functools.cache
def command_server() -> CommandServer:
    server = CommandServer()
    atexit.register(server.close)
    return server


def headrace(*arguments: str, timeout: float = 200, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command line, as a user calls it; commands that may need torch are forked from a process that has it."""
    if arguments[0] not in NEW_PROCESS:
        return command_server().run(arguments, timeout, cwd)
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        check=False,
    )


def start(*arguments: str) -> subprocess.Popen[str]:
    """The command line in the background, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "headrace", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )


def worker_pids(run_dir: Path) -> dict[str, int]:
    """The live worker processes of a run, by name."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if "headrace.cluster.worker_main" in command and str(run_dir) in command:
            role, rank = command[command.index("--role") + 1], command[command.index("--rank") + 1]
            found[f"{role}-{rank}"] = int(process.name)
    return found


def segments_left() -> set[str]:
    """Shared-memory segments of small runs whose owner is gone: tests of a transport alone leave some for a moment."""
    names = {path.name for path in Path("/dev/shm").glob(f"headrace-{NAME}-*") if path.stat().st_uid == os.getuid()}
    return {name for name in names if not Path(f"/proc/{name.split('-')[-2]}").exists()}


def recompute(run_dir: Path, where: str = "TRUE") -> tuple[int, int]:
    """Compare recorded rollouts with a plain Hugging Face forward under the tagged versions, token by token.

    All sampled tokens, also those that an earlier attempt had sampled and that are not trained.
    Returns the tokens compared, and how many rollouts have tokens of several versions that were compared. A version's
    weights are those of the checkpoint with as many steps: what was published again has them too.
    """
    models = {}
    for path in (run_dir / "checkpoints").glob("step-*"):
        state = json.loads((path / "trainer" / "state.json").read_text())["state"]
        models[state["policy_steps"]] = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with sqlite3.connect(run_dir / "journal.db") as db:
        steps = dict(db.execute("SELECT id, step FROM versions"))
    compared = mixed = 0
    for rollout in Run(run_dir).rollouts(where):
        (trace,) = rollout.traces
        tokens = torch.tensor(trace.token_ids.astype(np.int64))
        sampled = trace.versions != NO_VERSION
        known = [version for version in np.unique(trace.versions[sampled]).tolist() if steps[version] in models]
        mixed += len(known) > 1
        for version in known:
            with torch.no_grad():
                logits = models[steps[version]](input_ids=tokens[None]).logits[0]
            reference = torch.log_softmax(logits[:-1], -1)[torch.arange(len(tokens) - 1), tokens[1:]].numpy()
            here = trace.versions == version
            np.testing.assert_allclose(trace.logprobs[here], reference[here[1:]], atol=1e-4, err_msg=rollout.id)
            compared += int(here.sum())
    return compared, mixed

"""Small real runs for tests: the quickstart's model and data, cut down to seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headrace.config import Config, load_config

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/quickstart/quickstart.toml"
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
    return [*SMALL, f"run.directory={directory}", "run.name=run", *more]


def small_config(directory: Path, *more: str) -> Config:
    return load_config(QUICKSTART, small_settings(directory, *more))


def headrace(*arguments: str, timeout: float = 200, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command line, as a user calls it."""
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
        if "headrace.pipeline.worker" in command and str(run_dir) in command:
            role, rank = command[command.index("--role") + 1], command[command.index("--rank") + 1]
            found[f"{role}-{rank}"] = int(process.name)
    return found


def segments_left() -> set[str]:
    """Shared-memory segments of this user whose owner is gone."""
    names = {path.name for path in Path("/dev/shm").glob("headrace-*") if path.stat().st_uid == os.getuid()}
    return {name for name in names if not Path(f"/proc/{name.split('-')[-2]}").exists()}

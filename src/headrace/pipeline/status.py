"""The file `status.json`, which says who waits for whom in a live run. The file is replaced as a whole every second."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headrace.errors import UserError
from headrace.pipeline.controller import Controller
from headrace.run_dir import RunDir

LATE_SECONDS = 5.0
"""If the status is older than this, the controller hangs or was killed."""


class Wait(msgspec.Struct, frozen=True):
    """One registered wait (see `waits`)."""

    owner: str
    what: str
    seconds: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run."""

    time: float
    pid: int
    phase: str
    still: float
    """The seconds since anything made progress."""
    limit: float
    """The value of `[pipeline] stall_seconds`."""
    waits: list[Wait]
    processes: dict[str, str]
    """The phase that each process reports, by process."""


def write_status(run_dir: RunDir, controller: Controller, phases: Mapping[str, str]) -> None:
    """Refresh the file. `phases` maps a worker process to the phase that it reports."""
    quiet = controller.watch.quiet(controller.parts.pool.running)
    waits = [Wait(*entry) for entry in controller.waits.entries()]
    waits += [Wait(_counted(requests), f"a token of {engine}", since) for engine, requests, since in quiet]
    status = Status(
        time=time.time(),
        pid=os.getpid(),
        phase=controller.recorder.shown.phase,
        still=controller.waits.still,
        limit=controller.config.pipeline.stall_seconds,
        waits=sorted(waits, key=lambda wait: -wait.seconds),
        processes=dict(phases),
    )
    part = run_dir.status.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(status))
    part.replace(run_dir.status)


def _counted(requests: int) -> str:
    return f"{requests} request" + "s" * (requests != 1)


def read_status(path: str | Path) -> Status:
    """Read the status of a live run. Raises `UserError` if no run is live in this directory."""
    run_dir, _ = RunDir.open(path)
    try:
        return msgspec.json.decode(run_dir.status.read_bytes(), type=Status)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: no run lives there (it has no status.json)") from error


def describe(status: Status) -> str:
    """Describe a status for people: what makes progress, who waits for whom, what each process does."""
    age = time.time() - status.time
    lines = [f"{status.phase}; something moved {status.still:.0f} s ago (a stall after {status.limit:g} s)"]
    if age > LATE_SECONDS:
        lines = [f"the controller (process {status.pid}) has written nothing for {age:.0f} s: it hangs, or was killed"]
    lines += [f"  {wait.owner} waits for {wait.what}, since {wait.seconds:.0f} s" for wait in status.waits]
    lines += [f"  {name}: {phase}" for name, phase in sorted(status.processes.items())]
    return "\n".join(lines)

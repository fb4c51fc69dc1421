"""`status.json`: who waits for whom in a run that lives, refreshed each second, whole or not there."""

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
"""A status that is older was not written by a controller that is well."""


class Wait(msgspec.Struct, frozen=True):
    """An entry of the book of waits."""

    owner: str
    what: str
    seconds: float


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands."""

    time: float
    pid: int
    phase: str
    still: float
    """Seconds since anything moved."""
    limit: float
    """`[pipeline] stall_seconds`."""
    waits: list[Wait]
    processes: dict[str, str]
    """Process -> what it says that it does."""


def write_status(run_dir: RunDir, controller: Controller, phases: Mapping[str, str]) -> None:
    """Refresh the file. `phases` are what the worker processes say that they do."""
    quiet = controller.watch.quiet(controller.parts.pool.running)
    waits = [Wait(*entry) for entry in controller.waits.entries()]
    waits += [Wait(_counted(requests), f"a token of {engine}", since) for engine, requests, since in quiet]
    status = Status(
        time=time.time(),
        pid=os.getpid(),
        phase=controller.recorder.phase,
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
    """The status of a run that lives; a `UserError` if none does."""
    run_dir, _ = RunDir.open(path)
    try:
        return msgspec.json.decode(run_dir.status.read_bytes(), type=Status)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: no run lives there (it has no status.json)") from error


def describe(status: Status) -> str:
    """For people: what moves, who waits for whom, what each process does."""
    age = time.time() - status.time
    lines = [f"{status.phase}; something moved {status.still:.0f} s ago (a stall after {status.limit:g} s)"]
    if age > LATE_SECONDS:
        lines = [f"the controller (process {status.pid}) has written nothing for {age:.0f} s: it hangs, or was killed"]
    lines += [f"  {wait.owner} waits for {wait.what}, since {wait.seconds:.0f} s" for wait in status.waits]
    lines += [f"  {name}: {phase}" for name, phase in sorted(status.processes.items())]
    return "\n".join(lines)

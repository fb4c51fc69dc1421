"""Processes for foreign code, spoken to over two pipes: one leads a group, which is killed as a whole.

What such a process prints goes to a log, never into its answers, and no wait for its end is longer than a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

CLOSE_SECONDS = 5.0


async def spawn(module: str, directory: Path, log: Path | None) -> Process:
    """Start a module in this directory; what it prints as errors goes to `log`, or where ours go."""
    with contextlib.ExitStack() as stack:
        errors = None if log is None else stack.enter_context(log.open("ab"))
        return await asyncio.create_subprocess_exec(
            # -P: files beside the user's own must not hide the modules that the worker needs.
            *(sys.executable, "-P", "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            cwd=directory,
            start_new_session=True,
        )


def close_pipe(process: Process) -> None:
    """End what it reads, which ends a process that behaves. Idempotent."""
    if process.stdin is not None:
        process.stdin.close()


def kill_group(process: Process) -> None:
    """Kill it with all that it started."""
    # Its group outlives it if it left processes behind, and keeps its number from being given to others.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def ended(process: Process, seconds: float = CLOSE_SECONDS) -> bool:
    """Wait for its end; whether it came in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
            return True
    return False


async def how_it_ended(process: Process) -> str:
    """In words, of a process that answers no more."""
    if not await ended(process) or process.returncode is None:
        return "its pipe closed"
    code = process.returncode
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

"""Processes that run foreign code and talk over two pipes. Each leads a process group, which is killed as a whole.

What such a process prints goes to a log, never into its answers. Every wait for its end has a deadline.
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
    """Start a module in this directory. Its standard error goes to `log`, or to this process's standard error."""
    with contextlib.ExitStack() as stack:
        errors = None if log is None else stack.enter_context(log.open("ab"))
        return await asyncio.create_subprocess_exec(
            # -P: files in the user's directory must not hide the modules that the worker needs.
            *(sys.executable, "-P", "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            cwd=directory,
            start_new_session=True,
        )


def close_pipe(process: Process) -> None:
    """Close the process's standard input, which ends a well-behaved process. Idempotent."""
    if process.stdin is not None:
        process.stdin.close()


def kill_group(process: Process) -> None:
    """Kill the process and everything that it started."""
    # The group outlives its leader if the leader left processes behind. The kernel does not reuse the id of such a
    # group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


async def ended(process: Process, seconds: float = CLOSE_SECONDS) -> bool:
    """Wait until the process ends. Returns whether it ended within `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
            return True
    return False


async def how_it_ended(process: Process) -> str:
    """Describe in words how a process that no longer answers has ended."""
    if not await ended(process) or process.returncode is None:
        return "its pipe closed"
    code = process.returncode
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

"""A worker that runs agents: `python -m headrace.gateway.agent_main`, several at a time, each in a thread.

It starts from its first line alone, ends with its owner, and takes with it all that its agents started. What an agent
prints goes to the worker's log, never into the pipes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import BinaryIO

import msgspec

from headrace.errors import ConfigError
from headrace.gateway.agent_calls import CommandAgent, FunctionAgent
from headrace.gateway.frames import Halt, Hello, Job, Setup, ToWorker, pack


def main() -> None:
    """Say hello, then run agents until the owner closes the pipe."""
    asked, told = _private_pipes()
    line = asked.readline()
    if not line:
        return
    setup = msgspec.json.decode(line, type=Setup)
    if setup.command is None:
        _die_with_owner()
    try:
        agent = FunctionAgent(setup.function or "") if setup.command is None else CommandAgent(setup.command)
    except ConfigError as error:
        told.write(pack(Hello(error=str(error))))
        told.flush()
        return
    told.write(pack(Hello()))
    told.flush()
    Worker(agent, told).serve(asked)
    agent.end()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)


class Worker:
    """Threads with agents in them, and the one pipe that they answer through."""

    def __init__(self, agent: FunctionAgent | CommandAgent, told: BinaryIO) -> None:
        self._agent = agent
        self._told = told
        self._turn = threading.Lock()

    def serve(self, asked: BinaryIO) -> None:
        """Until the pipe ends."""
        decoder = msgspec.json.Decoder(ToWorker)
        for line in asked:
            match decoder.decode(line):
                case Job() as job:
                    threading.Thread(target=self._run, args=(job,), name=job.id, daemon=True).start()
                case Halt(id=id):
                    self._agent.halt(id)

    def _run(self, job: Job) -> None:
        done = self._agent.run(job)
        with self._turn, contextlib.suppress(BrokenPipeError):
            self._told.write(pack(done))
            self._told.flush()


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take the two pipes away from descriptors 0 and 1, so that `print` and `input` cannot touch them."""
    asked, told = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return asked, told


def _die_with_owner() -> None:
    """Ask Linux to kill this process with its owner: a function that holds the interpreter's lock stops `serve`.

    Not where agents are commands: then no foreign code runs here, and this process must live to end them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()

"""The launcher's connection to its driver, the process that talks to Ray. Every wait for the driver ends with it."""

import asyncio
import contextlib
import itertools
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from headrace.cluster.base import EXIT_USER_ERROR
from headrace.cluster.launchers.exits import last_lines
from headrace.cluster.launchers.ray_messages import (
    LINE_BYTES,
    Answer,
    ListNodes,
    News,
    Request,
    Reserve,
    Start,
    WorkerEnded,
)

LEAVE_SECONDS = 5.0
"""Seconds in which the driver must leave the cluster when its connection is closed."""


class DriverEnded(Exception):
    """The driver has ended. The text is one line that says why."""


class DriverLink:
    """A driver, and the connection to it."""

    def __init__(
        self,
        process: Process,
        output: BinaryIO,
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        ended: Callable[[WorkerEnded], None],
    ) -> None:
        """Listen to a driver. `ended` is called with the news of every worker that ended."""
        self._process = process
        self._output = output
        self._reader, self._writer = connection
        self._ended = ended
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self.over = asyncio.create_task(self._listen(), name="listen to the Ray driver")
        """This task ends with the driver. Its result says in one line why the driver has ended."""

    @classmethod
    async def start(cls, ended: Callable[[WorkerEnded], None]) -> "DriverLink":
        """Start a driver, which joins the cluster. What Ray prints stays in a file without a name."""
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115
        command = [sys.executable, "-m", "headrace.cluster.launchers.ray_driver"]
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=theirs.fileno(), stdout=output, stderr=output, start_new_session=True
            )
        return cls(process, output, await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES), ended)

    def next_id(self) -> int:
        """Return the id for the next request."""
        return next(self._ids)

    async def ask(self, request: ListNodes | Reserve | Start) -> Answer:
        """Send a request and wait for its answer. Raises `DriverEnded` if the driver ends before."""
        if self.over.done():
            raise DriverEnded(self.over.result())
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[request.id] = answer
        self.send(request)
        return await answer

    def send(self, request: Request) -> None:
        """Send a request, without waiting."""
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(request) + b"\n")

    async def end(self) -> None:
        """Close the connection, which ends the driver and all its workers. Idempotent."""
        self._writer.close()
        await asyncio.wait([self.over])

    async def _listen(self) -> str:
        reason = "the connection to the Ray driver failed"
        try:
            with contextlib.suppress(OSError):
                while line := await self._reader.readline():
                    news: News = msgspec.json.decode(line, type=News)
                    if isinstance(news, WorkerEnded):
                        self._ended(news)
                    elif not (answer := self._asked.pop(news.id)).done():
                        answer.set_result(news)
            reason = await self._how_it_ended()
        finally:
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(DriverEnded(reason))
        return reason

    async def _how_it_ended(self) -> str:
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), LEAVE_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        code = await self._process.wait()
        with self._output:
            lines = last_lines(self._output).splitlines()
        said = lines[-1] if lines else f"exit code {code}"
        return said if code == EXIT_USER_ERROR else f"the Ray driver ended: {said}"

"""Whether the server behind a driver is still there: an engine whose server is lost is lost too, and says nothing more.

Lost is a server whose process has ended, that refuses connections, or that calls itself broken, twice in a row. One
that is merely slow to answer is not: whether it makes progress is seen by whoever waits for tokens.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from headrace.engines.vllm.client import VllmClient
from headrace.errors import ChannelError, DeadlineError, HttpError, PeerDied, UserError

WATCH_SECONDS = 1.0
AGAIN_SECONDS = 0.3
"""Between two questions of which both must go unanswered."""
ANSWER_SECONDS = 5.0
ENDING_SECONDS = 5.0
"""In which a server of ours that no longer serves may end: how it ended says why."""


class StartedServer(Protocol):
    """A server of ours, whose process can be seen."""

    def check(self) -> None:
        """Raise `UserError` if the process has ended."""
        ...


class ServerHealth:
    """The pulse of one server; `started` where it is ours."""

    def __init__(self, client: VllmClient, started: StartedServer | None = None) -> None:
        self._client = client
        self._started = started

    async def check(self) -> None:
        """Raise `PeerDied` if the server is lost."""
        self._check_process()
        if await self._trouble():
            await asyncio.sleep(AGAIN_SECONDS)
            if trouble := await self._trouble():
                await self._ending()
                raise PeerDied("vLLM", trouble)

    async def watch(self) -> None:
        """Check again and again, until it is lost."""
        while True:
            await self.check()
            await asyncio.sleep(WATCH_SECONDS)

    async def _ending(self) -> None:
        deadline = time.monotonic() + ENDING_SECONDS
        while self._started is not None and time.monotonic() < deadline:
            self._check_process()
            await asyncio.sleep(AGAIN_SECONDS)

    def _check_process(self) -> None:
        try:
            if self._started is not None:
                self._started.check()
        except UserError as error:
            raise PeerDied("vLLM", str(error)) from error

    async def _trouble(self) -> str:
        try:
            return await _trouble(self._client)
        except DeadlineError:
            return ""


async def until_there(client: VllmClient, deadline: float) -> None:
    """Wait for a server that others start, or start again; raises `UserError` if it does not come."""
    began = time.monotonic()
    while True:
        try:
            trouble = await _trouble(client)
        except DeadlineError as error:
            trouble = str(error)
        if not trouble:
            return
        if time.monotonic() - began > deadline:
            raise UserError(f"{trouble} (waited for {deadline:g} s)" if deadline else trouble)
        await asyncio.sleep(WATCH_SECONDS)


async def _trouble(client: VllmClient) -> str:
    """What shows that a server is lost, or nothing; raises `DeadlineError` if it does not answer."""
    try:
        await client.http.call("GET", "/health", timeout=ANSWER_SECONDS)
    except DeadlineError:
        raise
    except HttpError as error:
        return str(error) if error.status >= 500 else ""
    except ChannelError as error:
        return str(error)
    return ""

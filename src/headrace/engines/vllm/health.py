"""Checks whether the vLLM server of an engine is still there. If the server is lost, the engine is lost too.

A server is lost if its process has ended, or if it twice in a row refuses connections or reports that it is broken. A
server that is only slow to answer is not lost: its progress is checked by the deadlines for tokens.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from headrace.engines.vllm.client import VllmClient
from headrace.errors import ChannelError, DeadlineError, HttpError, PeerDied, UserError

WATCH_SECONDS = 1.0
AGAIN_SECONDS = 0.3
"""The time between two checks, which must both fail before a server counts as lost."""
ANSWER_SECONDS = 5.0
ENDING_SECONDS = 5.0
"""How long to wait for the process of a broken server to end, because its end tells the reason."""


class StartedServer(Protocol):
    """A server that this process started, so that its process can be checked."""

    def check(self) -> None:
        """Raise `UserError` if the process has ended."""
        ...


class ServerHealth:
    """The health of one server. `started` is given if this process started the server."""

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
        """Check repeatedly, and raise `PeerDied` when the server is lost."""
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
    """Wait for a server that somebody else starts or restarts. Raises `UserError` if it is not there in time."""
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
    """Return the sign that a server is lost, or an empty string. Raises `DeadlineError` if it does not answer."""
    try:
        await client.http.call("GET", "/health", timeout=ANSWER_SECONDS)
    except DeadlineError:
        raise
    except HttpError as error:
        return str(error) if error.status >= 500 else ""
    except ChannelError as error:
        return str(error)
    return ""

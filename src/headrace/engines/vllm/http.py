"""HTTP to one vLLM server through aiohttp: JSON calls, and streams of server-sent events.

Every wait has a deadline, and every failure is a `ChannelError`. Each request has its own connection. So a stream is
given up by closing its connection, and a request that must not be sent twice never uses a connection that the server
has just closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from headrace.errors import ChannelError, DeadlineError, HttpError, UserError

CONNECT_SECONDS = 10.0
STREAMS = 256
CONTROLS = 16
"""The number of connections beside the streams, so that a health check or an abort never waits for a stream to end."""


class Http:
    """A connection pool to one server. `key` is sent with every request. At most `streams` streams may be open."""

    def __init__(self, url: str, key: str = "", *, streams: int = STREAMS) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connections = streams + CONTROLS
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(self, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
        """Return the decoded JSON of the answer, or its text if it is not JSON.

        Raises `HttpError` for a status of 400 and above.
        """
        text = await self.text(method, path, body, timeout=timeout)
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text.decode(errors="replace")

    async def text(self, method: str, path: str, body: Any = None, *, timeout: float) -> bytes:
        """Return the raw body of the answer."""
        try:
            async with asyncio.timeout(timeout), self._exchange(method, path, body) as answer:
                return await answer.read()
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}{path} did not answer in {timeout:g} s") from error

    async def events(self, path: str, body: Any, *, silence: float) -> AsyncIterator[bytes]:
        """Yield the data of each event until `[DONE]`. At most `silence` seconds may pass between two parts."""
        rest = b""
        try:
            async with self._exchange("POST", path, body, silence) as answer:
                async for part in answer.content.iter_any():
                    *events, rest = (rest + part).split(b"\n\n")
                    for event in events:
                        data = event.removeprefix(b"data: ")
                        if data == b"[DONE]":
                            return
                        yield data
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}{path} sent nothing in {silence:g} s") from error
        raise ChannelError(f"{self.url}{path} broke off in the middle of an answer")

    async def close(self) -> None:
        """Close all connections. Idempotent. A later request raises `ChannelError`."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: Any, silence: float | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and yield its answer, whose body is not read yet.

        `silence` is the longest time between two reads of the body, in seconds.
        """
        answer: aiohttp.ClientResponse | None = None
        content = None if body is None else msgspec.json.encode(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            answer = await self._opened().request(
                method,
                self.url + path,
                data=content,
                headers=self._headers | kind,
                timeout=aiohttp.ClientTimeout(connect=CONNECT_SECONDS, sock_read=silence),
                allow_redirects=False,
            )
            if answer.status >= 400:
                raise HttpError(self.url + path, answer.status, _reason(await answer.read()))
            yield answer
        except aiohttp.ConnectionTimeoutError as error:
            raise ChannelError(f"{self.url} cannot be reached: no connection in time") from error
        except aiohttp.ClientConnectorError as error:
            raise ChannelError(f"{self.url} cannot be reached: {error.os_error}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise  # TimeoutError is an OSError too. It is handled by the caller that set the deadline.
            raise ChannelError(f"{self.url}{path} broke off: {error}") from error
        finally:
            if answer is not None:
                answer.close()

    def _opened(self) -> aiohttp.ClientSession:
        """Return the session. It is made on first use, because it needs the running event loop."""
        if self._closed:
            raise ChannelError(f"{self.url}: the connection to it is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _reason(body: bytes) -> str:
    """Return the server's description of an error in one line."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = body.decode(errors="replace")
    for key in ("error", "detail", "message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return " ".join(str(answer).split())[:500]

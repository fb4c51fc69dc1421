"""A server with an HTTP API that a scorer asks. Every request ends: with the body of an answer, or with a reason."""

from http import HTTPStatus
from typing import Any

import aiohttp

from headrace.errors import one_line
from headrace.reference import describe
from headrace.scoring.asking import NoUseToRetry, Unreachable
from headrace.scoring.base import ScoreError

REPLY_BYTES = 1 << 24
"""The longest answer of a server. A longer one fails its question."""
SHOWN = 200
"""How much of a server's error is shown, in characters."""

REFUSED = {
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.NOT_FOUND,
    HTTPStatus.UNPROCESSABLE_ENTITY,
}
"""The states with which a server refuses a question that it would refuse again."""
BUSY = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
"""The states with which a server, or what stands before it, says that it cannot answer now."""


class Server:
    """One address of a server, which is asked by JSON."""

    def __init__(self, url: str, *, key: str, concurrency: int, longest: int = REPLY_BYTES) -> None:
        """`key` is the API key; empty if the server needs none. `longest` is the longest answer, in bytes."""
        self.url = url
        self._key = key
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._concurrency = concurrency
        self._longest = longest
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the session, before the first question."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self._concurrency),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def close(self) -> None:
        """Close the session. Idempotent."""
        if self._session is not None:
            await self._session.close()

    async def post(self, body: dict[str, Any]) -> bytes:
        """Return the body of the answer. Raises `ScoreError` with what went wrong."""
        if self._session is None:
            raise ScoreError(f"the connection to {self.url} was not opened")
        try:
            async with self._session.post(
                self.url, json=body, headers=self._headers, allow_redirects=False
            ) as response:
                text = await response.content.read(self._longest + 1)
                while len(text) <= self._longest and (more := await response.content.read(self._longest)):
                    text += more
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{self.url} cannot be reached: {one_line(describe(error), SHOWN)}") from error
        if response.status != HTTPStatus.OK:
            said = text[: self._longest].decode(errors="replace")
            # A server may quote the key that it refuses, and this line goes to the ledger and to the log.
            why = one_line(said.replace(self._key, "***") if self._key else said, SHOWN)
            failure = NoUseToRetry if response.status in REFUSED else ScoreError
            failure = Unreachable if response.status in BUSY else failure
            raise failure(f"{self.url} answered {response.status}: {why}")
        if len(text) > self._longest:
            raise ScoreError(f"{self.url} answered with more than {self._longest:,} bytes")
        return text

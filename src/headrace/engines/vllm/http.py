"""As much HTTP as a vLLM server needs, on asyncio alone: JSON calls, and streams of server-sent events.

One connection per request: closing it is how a stream is given up. Every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headrace.errors import ChannelError, DeadlineError, HttpError, UserError

CONNECT_SECONDS = 10.0
_LINE_LIMIT = 1 << 26
"""The longest line: an answer with the scores of a long sequence is one."""


class Http:
    """A server by its URL; `key` goes with every request."""

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8000")
        self.url = url.rstrip("/")
        self.host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._key = key

    async def call(self, method: str, path: str, body: Any = None, *, timeout: float) -> Any:
        """The answer's JSON (its text where it is none). Raises `HttpError` for a status of 400 and above."""
        text = await self.text(method, path, body, timeout=timeout)
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return text.decode(errors="replace")

    async def text(self, method: str, path: str, body: Any = None, *, timeout: float) -> bytes:
        """The answer's body as it is."""
        try:
            async with asyncio.timeout(timeout), self._exchange(method, path, body) as answer:
                return b"".join([part async for part in answer])
        except TimeoutError as error:
            raise DeadlineError(f"{self.url}{path} did not answer in {timeout:g} s") from error

    async def events(self, path: str, body: Any, *, silence: float) -> AsyncIterator[bytes]:
        """The data of each event, until `[DONE]`; no two are further apart than `silence` seconds."""
        async with self._exchange("POST", path, body) as answer:
            rest = b""
            while True:
                try:
                    async with asyncio.timeout(silence):
                        part = await anext(answer, b"")
                except TimeoutError as error:
                    raise DeadlineError(f"{self.url}{path} sent nothing in {silence:g} s") from error
                if not part:
                    raise ChannelError(f"{self.url}{path} broke off in the middle of an answer")
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        return
                    yield data

    @asynccontextmanager
    async def _exchange(self, method: str, path: str, body: Any) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a request; within, the parts of the answer's body."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(self.host, self._port, ssl=self._tls, limit=_LINE_LIMIT)
        except (OSError, TimeoutError) as error:
            raise ChannelError(f"{self.url} cannot be reached: {error or 'no connection in time'}") from error
        try:
            writer.write(self._request(method, path, body))
            await writer.drain()
            status, headers = await _head(reader)
            parts = _body(reader, headers)
            if status >= 400:
                raise HttpError(self.url + path, status, _reason(b"".join([part async for part in parts])))
            yield parts
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            raise ChannelError(f"{self.url}{path} broke off: {error}") from error
        finally:
            writer.close()
            # A peer that never closes its side must not hold us.
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await writer.wait_closed()

    def _request(self, method: str, path: str, body: Any) -> bytes:
        content = b"" if body is None else msgspec.json.encode(body)
        lines = [
            f"{method} {self._prefix}{path} HTTP/1.1",
            f"Host: {self.host}:{self._port}",
            "Connection: close",
            f"Content-Length: {len(content)}",
        ]
        if body is not None:
            lines.append("Content-Type: application/json")
        if self._key:
            lines.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    words = (await reader.readuntil(b"\r\n")).split(None, 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        raise ValueError("the answer is not HTTP")
    headers = {}
    while (line := (await reader.readuntil(b"\r\n")).strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(words[1]), headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        if size := int(headers["content-length"]):
            yield await reader.readexactly(size)
    else:
        while part := await reader.read(1 << 16):
            yield part


def _reason(body: bytes) -> str:
    """What a server says about an error, in one line."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        answer = body.decode(errors="replace")
    for key in ("error", "detail", "message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return " ".join(str(answer).split())[:500]

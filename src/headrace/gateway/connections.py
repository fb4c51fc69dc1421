"""The connections of the gateway and the bodies that they send, within limits of number, time and memory.

A connection is idle until the header of a request has arrived in full. When there are too many connections, idle ones
are closed first, the oldest first: those that never had a valid key before the others. A connection that stays idle for
too long is closed as well. Nothing is read of a body that announces more bytes than are allowed, and no more than that
of one that announces nothing.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from headrace.channel.strangers import OPEN_FILES, raise_open_files
from headrace.gateway.base import ApiError

HEADER_SECONDS = 10.0
"""Seconds in which the header of a connection's first request must arrive."""
IDLE_SECONDS = 300.0
"""Seconds that a connection with a valid key may be idle between two requests."""
BODY_SECONDS = 60.0
"""Seconds in which a body must arrive."""
SWEEP_SECONDS = 1.0
DRAIN_BYTES = 2**20
DRAIN_SECONDS = 1.0
"""Of a refused body, this much is read and dropped, because many clients read no answer before they have sent all."""
SPARE_FILES = 256
"""Files that the process needs beside its connections, and connections that are accepted before one can be refused."""
BODIES_AT_ONCE = 8
"""All bodies together may take as much memory as this many of the largest."""
_REFUSAL = b'{"error": {"message": "too many connections", "type": "server_error"}}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_REFUSAL), _REFUSAL)
)

_LOG = logging.getLogger(__name__)
_LOG.addFilter(
    # Bytes that are no HTTP are answered with a 4xx. They are the client's mistake, and none of ours to log.
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def allowed_connections(wanted: int) -> int:
    """Return how many connections this process can hold, at most `wanted`. Its limit of open files is raised first."""
    return max(1, min(wanted, raise_open_files(max(OPEN_FILES, wanted + SPARE_FILES)) - SPARE_FILES))


class LimitedServer(web.Server):
    """An HTTP server with a limited number of connections."""

    def __init__(self, answer: Answer, connections: int) -> None:
        """Make a server. `answer` must close the connection of a client that has no valid key."""
        # When a client disconnects, its request is cancelled, and the engines are told.
        super().__init__(
            self._answer,
            handler_cancellation=True,
            access_log=None,
            lingering_time=0.0,
            auto_decompress=False,
            logger=_LOG,
        )
        self._limit = connections
        self._handle = answer
        self._open: set[web.RequestHandler] = set()
        self._new: dict[web.RequestHandler, float] = {}
        """The connections without a request so far, and since when; the oldest first."""
        self._idle: dict[web.RequestHandler, float] = {}
        """The connections between two requests, and since when; the oldest first."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Take a connection. If there are too many, close an idle one, or refuse this one if all are busy."""
        super().connection_made(handler, transport)
        self._open.add(handler)
        if len(self._open) > self._limit:
            oldest = next(iter(self._new or self._idle), None)
            if oldest is None:
                transport.write(_FULL)
                oldest = handler
            self._close(oldest)
        if handler in self._open:
            self._new[handler] = time.monotonic()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        super().connection_lost(handler, exc)
        self._forget(handler)

    async def sweep(self) -> None:
        """Close connections that are idle for too long, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            late = [handler for handler, since in self._new.items() if now - since > HEADER_SECONDS]
            late += [handler for handler, since in self._idle.items() if now - since > IDLE_SECONDS]
            for handler in late:
                self._close(handler)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._new.pop(connection, None)
        self._idle.pop(connection, None)
        try:
            return await self._handle(request)
        finally:
            if connection in self._open:
                self._idle[connection] = time.monotonic()

    def _close(self, handler: web.RequestHandler) -> None:
        self._forget(handler)
        handler.force_close()

    def _forget(self, handler: web.RequestHandler) -> None:
        self._open.discard(handler)
        self._new.pop(handler, None)
        self._idle.pop(handler, None)


class Bodies:
    """The bodies of requests that are being answered."""

    def __init__(self, largest: int) -> None:
        """`largest` is the number of bytes that one body may have."""
        self._largest = largest
        self._held = 0

    @asynccontextmanager
    async def read(self, request: web.BaseRequest) -> AsyncIterator[bytes]:
        """Read a body. Its bytes count until the context ends. Raises `ApiError`."""
        chunks: list[bytes] = []
        try:
            await self._read(request, chunks)
            yield b"".join(chunks)
        finally:
            self._held -= sum(map(len, chunks))

    async def _read(self, request: web.BaseRequest, chunks: list[bytes]) -> None:
        self._check(request.content_length or 0, self._held + (request.content_length or 0))
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "the request's body: it must not be compressed")
        if request.headers.get("expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.content.iter_any():
                    chunks.append(chunk)
                    size += len(chunk)
                    self._held += len(chunk)
                    self._check(size, self._held)
        except TimeoutError:
            raise ApiError(408, f"the request's body did not arrive within {BODY_SECONDS:g} s") from None
        except web.RequestPayloadError as error:
            raise ApiError(400, f"the request's body: {error}") from error

    def _check(self, size: int, held: int) -> None:
        """Raise `ApiError` if a body is too large, or all bodies together are."""
        if size > self._largest:
            raise ApiError(413, f"the request's body has more than {self._largest} bytes ([gateway] max_body)")
        if held > BODIES_AT_ONCE * self._largest:
            raise ApiError(429, "the gateway is reading too many large bodies: ask again", retry_after=1)


async def drain(request: web.BaseRequest) -> None:
    """Read and drop a little of a body that nobody wants."""
    left = DRAIN_BYTES
    with suppress(TimeoutError, web.RequestPayloadError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in request.content.iter_any():
                left -= len(chunk)
                if left < 0:
                    return

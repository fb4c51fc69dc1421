"""The newest numbers of a run in the text format of Prometheus, over HTTP. The endpoint is read-only and has no keys.

The numbers are those of the newest step, and of the newest record of every other kind. Scraping costs the run one
rendering of about fifty lines. A client that sends nothing is cut off, and only a few are served at once. If the port
is taken, the run says so in one line and goes on without the endpoint.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

from headrace.errors import ConfigError
from headrace.observe.trackers.base import numbers_of

LOOPBACK = "127.0.0.1"
READ_SECONDS = 5.0
MOST_CLIENTS = 16
MOST_BYTES = 8192
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ODD = re.compile(r"[^a-zA-Z0-9_]")


class Address(NamedTuple):
    """Where the endpoint listens."""

    host: str
    port: int


def parse_address(text: str) -> Address:
    """Read `host:port`, `[host]:port`, or a port alone, which is one of this host's loopback."""
    host, _, port = text.strip().rpartition(":")
    if not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ConfigError(f"[observe] prometheus: {text!r} is not an address such as 127.0.0.1:9400")
    return Address(host.strip("[]") or LOOPBACK, int(port))


class Gauges:
    """The newest numbers of one run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._values: dict[tuple[str, str], float] = {}
        """(name, further label) -> value."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take a record, as in a line of `metrics.jsonl`."""
        if record["kind"] == "advice":
            self._values["advice", f',cause="{_quoted(record["cause"])}"'] = 1.0
            return
        found = numbers_of(record)
        if record["kind"] == "step":
            found["step"] = float(record["step"])
        for key, number in found.items():
            kind, _, name = key.partition("/")
            if kind in ("score", "extra"):
                self._values[kind, f',name="{_quoted(name)}"'] = number
            else:
                self._values[_ODD.sub("_", key), ""] = number
        if found:
            self._values["last_record_time_seconds", ""] = float(record["time"])

    def render(self) -> str:
        """Return all numbers in the text format of Prometheus."""
        lines: list[str] = []
        last = ""
        for (name, label), value in sorted(self._values.items()):
            if name != last:
                lines.append(f"# TYPE headrace_{name} gauge")
                last = name
            lines.append(f'headrace_{name}{{run="{_quoted(self._run)}"{label}}} {value!r}')
        return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


@asynccontextmanager
async def serve_gauges(address: Address, gauges: Gauges, note: Callable[[str], None]) -> AsyncIterator[Address | None]:
    """Serve the gauges inside this context. Gives the address that was bound; None if it could not be."""
    clients = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal clients
        clients += 1
        try:
            if clients <= MOST_CLIENTS:
                # A client that is slow, sends too much, or goes away gets no answer.
                with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                    async with asyncio.timeout(READ_SECONDS):
                        writer.write(_response(await reader.readuntil(b"\r\n\r\n"), gauges))
                        await writer.drain()
        finally:
            clients -= 1
            writer.close()

    try:
        server = await asyncio.start_server(answer, address.host, address.port, limit=MOST_BYTES)
    except OSError as error:
        where = f"{address.host}:{address.port}"
        note(f"[observe] prometheus: {where} cannot be bound ({error.strerror or error}); the numbers are not served")
        yield None
        return
    try:
        bound = server.sockets[0].getsockname()
        yield Address(bound[0], bound[1])
    finally:
        server.close()


def _response(request: bytes, gauges: Gauges) -> bytes:
    method, _, rest = request.partition(b" ")
    path = rest.split(b" ")[0].split(b"?")[0]
    if method not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed", b""
    elif path not in (b"/", b"/metrics"):
        status, body = "404 Not Found", b""
    else:
        status, body = "200 OK", gauges.render().encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == b"HEAD" else body)

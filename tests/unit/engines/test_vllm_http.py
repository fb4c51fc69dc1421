"""The HTTP client against raw sockets: however an answer is cut, it reads the same; every failure is one line."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from headrace.engines.vllm.client import VllmClient
from headrace.errors import ChannelError, DeadlineError, HttpError, UserError

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[VllmClient]:
    """A server that reads one request and lets `answer` write what it likes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or b"0")
        await answer(head + await reader.readexactly(length), writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        http = VllmClient(f"http://127.0.0.1:{port}/base/", key="secret")
        yield http
        await http.close()


def chunked(*parts: bytes) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def test_a_call_says_who_asks_for_what() -> None:
    seen: list[bytes] = []

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{"a": [1]}')

    async with serving(answer) as http:
        assert await http.call("POST", "/x?y=1", {"b": "ü"}, timeout=60) == {"a": [1]}
    assert seen[0].startswith(b"POST /base/x?y=1 HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in seen[0] and seen[0].endswith('{"b":"ü"}'.encode())


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_do_not_depend_on_how_they_are_cut(size: int) -> None:
    events = [b'{"n":%d}' % n for n in range(20)]
    stream = b"".join(b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"])

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        whole = chunked(*(stream[i : i + size] for i in range(0, len(stream), size)))
        for i in range(0, len(whole), 13):
            writer.write(whole[i : i + 13])
            await writer.drain()

    async with serving(answer) as http:
        assert [event async for event in http.events("/s", {}, silence=5)] == events


async def test_an_error_carries_its_status_and_its_reason_in_one_line() -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        body = b'{"error": {"message": "no\\n such\\tmodel", "code": 404}}'
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async with serving(answer) as http:
        with pytest.raises(HttpError) as caught:
            await http.call("GET", "/m", timeout=60)
        assert (caught.value.status, caught.value.reason) == (404, "no such model")
        with pytest.raises(HttpError):
            async for _ in http.events("/m", {}, silence=5):
                pass


async def test_an_answer_that_breaks_off_is_an_error_and_never_an_end() -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        whole = chunked(b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n")
        writer.write(whole[: whole.index(b"data: [DONE]")])

    async with serving(answer) as http:
        seen = []
        with pytest.raises(ChannelError, match="broke off"):
            async for event in http.events("/s", {}, silence=5):
                seen.append(event)
        assert seen == [b"1", b"2"]


async def test_silence_has_a_deadline() -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.5)

    async with serving(answer) as http:
        with pytest.raises(DeadlineError, match=r"sent nothing in 0\.1 s"):
            async for _ in http.events("/s", {}, silence=0.1):
                pass
        with pytest.raises(DeadlineError, match=r"did not answer in 0\.1 s"):
            await http.call("GET", "/s", timeout=0.1)


async def test_closing_a_stream_closes_its_connection() -> None:
    closed = asyncio.Event()

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            while True:
                writer.write(b"9\r\ndata: 1\n\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            closed.set()

    async with serving(answer) as http:
        stream = http.events("/s", {}, silence=5)
        assert await anext(stream) == b"1"
        await stream.aclose()  # type: ignore[attr-defined]
        await asyncio.wait_for(closed.wait(), 60)


async def test_nobody_there_and_no_url() -> None:
    async with serving(lambda request, writer: asyncio.sleep(0)) as closed:
        pass
    with pytest.raises(ChannelError, match="the connection to it is closed"):
        await closed.call("GET", "/", timeout=60)
    http = VllmClient(closed.url)
    with pytest.raises(ChannelError, match=r"cannot be reached: \[Errno \d+\] Connect call failed"):
        await http.call("GET", "/", timeout=60)
    with pytest.raises(ChannelError, match="cannot be reached"):
        await anext(http.events("/s", {}, silence=5))
    await http.close()
    with pytest.raises(UserError, match="is not the URL of a server"):
        VllmClient("localhost:8000")


async def test_an_answer_that_is_not_http_breaks_off() -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")

    async with serving(answer) as http:
        with pytest.raises(ChannelError, match="broke off"):
            await http.call("GET", "/", timeout=60)


async def test_a_server_that_closes_without_a_word_breaks_off_and_is_asked_only_once() -> None:
    asked: list[bytes] = []

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        asked.append(request)

    async with serving(answer) as http:
        with pytest.raises(ChannelError, match="broke off"):
            await http.call("POST", "/update_weights", {}, timeout=60)
    assert len(asked) == 1, "a request that changes something is not repeated"


async def test_calls_are_answered_while_all_streams_are_open() -> None:
    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        if request.startswith(b"GET"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        await asyncio.sleep(1.0)

    async with serving(answer) as given, asyncio.timeout(20):
        http = VllmClient(given.url, slots=3)
        streams = [http.events("/s", {}, silence=5) for _ in range(3)]
        assert [await anext(stream) for stream in streams] == [b"1"] * 3
        assert await http.call("GET", "/health", timeout=60) == {}
        await http.close()
        for stream in streams:
            await stream.aclose()  # type: ignore[attr-defined]

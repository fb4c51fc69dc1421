"""The limits of the gateway over real sockets: connections, headers, bodies, texts and answers under way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest
from gateway_parts import Gateway, client, fake_engine, opened, post, serving, until, user

from headrace.gateway import connections

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Len"


def address(gateway: Gateway) -> tuple[str, int]:
    host, port = gateway.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


@contextlib.contextmanager
def strangers(gateway: Gateway, number: int) -> Any:
    """Connections that have sent half a header."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_connection(address(gateway))) for _ in range(number)]
        for one in made:
            one.sendall(HALF)
            one.setblocking(False)
        yield made


def closed(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def answer_of(gateway: Gateway, request: bytes) -> tuple[int, bytes]:
    """Send these bytes and no more, and return the status and everything that comes back until the server closes."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address(gateway))
        writer.write(request)
        answer = await reader.read()
        writer.close()
    return int(answer.split(b" ", 2)[1]), answer


def head(gateway: Gateway, *fields: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {gateway.key}", *fields]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


async def test_friction_28_idle_connections_beyond_the_limit_are_closed_first() -> None:
    async with serving(connections=20) as gateway, client(gateway) as api:
        with strangers(gateway, 60) as made:
            await until(lambda: sum(map(closed, made)) >= 40)
            for _ in range(3):
                assert (await api.chat.completions.create(model="m", messages=[user("hi")])).choices
            await asyncio.sleep(0.1)
            assert not closed(made[-1]), "the newest have not been closed"


async def test_friction_28_a_header_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.05)
    async with serving() as gateway, client(gateway) as api:
        await api.models.list()
        with strangers(gateway, 5) as made:
            await until(lambda: all(map(closed, made)))
        assert await api.models.list(), "a connection with a key may be idle for longer"


async def test_when_all_connections_are_busy_a_new_one_is_refused() -> None:
    async with serving(fake_engine(lengths=[100_000], token_seconds=0.01), connections=2, max_length=10**6) as gateway:
        sessions = [opened(gateway, max_tokens=100_000) for _ in range(2)]
        asked = [
            asyncio.create_task(post(gateway, "/chat/completions", {"model": "m", "messages": [user("hi")]}, s.key))
            for s in sessions
        ]
        await until(lambda: all(session.requests for session in sessions))
        status, answer = await answer_of(gateway, head(gateway))
        assert status == 503 and b"Retry-After: 1" in answer and json.loads(answer.split(b"\r\n\r\n")[1])["error"]
        for session in sessions:
            gateway.sessions.remove(session)
        await asyncio.gather(*asked, return_exceptions=True)


async def test_friction_29_a_body_that_announces_too_much_is_refused_unread() -> None:
    async with serving(max_body=1000) as gateway:
        for length in (1001, 64 * 2**20, 10**15):
            status, answer = await answer_of(gateway, head(gateway, f"Content-Length: {length}"))
            assert status == 413 and b"more than 1000 bytes ([gateway] max_body)" in answer
        chunk = b"%x\r\n%b\r\n" % (600, b" " * 600)
        status, _ = await answer_of(gateway, head(gateway, "Transfer-Encoding: chunked") + 3 * chunk)
        assert status == 413
        assert (await post(gateway, "/completions", {"model": "m", "prompt": "a"}))[0] == 200


async def test_without_a_key_a_body_is_not_read() -> None:
    async with serving(max_body=1000) as gateway:
        request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
        assert (await answer_of(gateway, request))[0] == 401


async def test_a_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.1)
    async with serving() as gateway:
        status, answer = await answer_of(gateway, head(gateway, "Content-Length: 100") + b'{"mod')
        assert status == 408 and b"did not arrive within 0.1 s" in answer


async def test_all_bodies_together_are_limited() -> None:
    async with serving(max_body=1000) as gateway:
        held = []
        for _ in range(connections.BODIES_AT_ONCE):
            reader, writer = await asyncio.open_connection(*address(gateway))
            writer.write(head(gateway, "Content-Length: 1000") + b" " * 990)
            held.append((reader, writer))
        refused: list[tuple[int, bytes]] = []
        async with asyncio.timeout(20):
            while not refused or refused[-1][0] != 429:  # The others may not have been read yet.
                refused.append(await answer_of(gateway, head(gateway, "Content-Length: 900", "Connection: close")[:-2]
                               + b"\r\n" + b" " * 900))  # fmt: skip
        assert b"retry-after: 1" in refused[-1][1].lower()
        for _, writer in held:
            writer.close()
        async with asyncio.timeout(20):
            answered = 429
            while answered == 429:
                answered, _ = await post(gateway, "/completions", {"model": "m", "prompt": "a" * 150})
        assert answered == 200


async def test_broken_chunks_and_compressed_bodies_are_refused() -> None:
    async with serving() as gateway:
        assert (await answer_of(gateway, head(gateway, "Transfer-Encoding: chunked") + b"zz\r\nx\r\n"))[0] == 400
        fields = ("Content-Encoding: gzip", "Content-Length: 2", "Connection: close")
        assert (await answer_of(gateway, head(gateway, *fields) + b"{}"))[0] == 415


async def test_a_client_that_expects_is_told_to_continue() -> None:
    async with serving() as gateway:
        body = json.dumps({"model": "m", "messages": [user("hi")]}).encode()
        fields = ("Expect: 100-continue", f"Content-Length: {len(body)}", "Connection: close")
        _, answer = await answer_of(gateway, head(gateway, *fields) + body)
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


async def test_friction_29_a_long_text_is_refused_before_it_is_encoded() -> None:
    async with serving(max_body=32 * 2**20) as gateway:
        session = opened(gateway)
        for content in ("a" * 10**7, "ab " * 2000):
            body = {"model": "m", "messages": [user(content)]}
            status, answer = await post(gateway, "/chat/completions", body, session.key)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert f"{len(content)} characters leave no room under the longest length of 200" in str(answer)
        assert session.exhausted
        status, answer = await post(gateway, "/completions", {"model": "m", "prompt": [1] * 10**6})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_long_text_that_may_fit_is_encoded_beside_other_requests() -> None:
    async with serving(max_length=20_000) as gateway:
        session = opened(gateway)
        body = {"model": "m", "messages": [user("ghij" * 4000)]}
        long, short = await asyncio.gather(
            post(gateway, "/chat/completions", body, session.key),
            post(gateway, "/chat/completions", {"model": "m", "messages": [user("hi")]}),
        )
        assert (long[0], short[0]) == (200, 200)
        assert long[1]["usage"]["prompt_tokens"] == len(gateway.chat.open([user("ghij" * 4000)]))


async def test_answers_beyond_the_queue_are_told_to_come_again() -> None:
    engine = fake_engine(lengths=[100_000], token_seconds=0.01)
    async with serving(engine, queue=3, max_length=10**6) as gateway:
        session = opened(gateway, max_tokens=100_000)
        body = {"model": "m", "messages": [user("hi")], "n": 2}
        first = asyncio.create_task(post(gateway, "/chat/completions", body, session.key))
        await until(lambda: session.requests == 1)
        length = len(data := json.dumps(body).encode())
        status, answer = await answer_of(
            gateway, head(gateway, f"Content-Length: {length}", "Connection: close") + data
        )
        assert status == 429 and b"retry-after: 1" in answer.lower() and b"2 answers are under way" in answer
        gateway.sessions.remove(session)
        await asyncio.gather(first, return_exceptions=True)
        done = await post(gateway, "/chat/completions", {**body, "max_tokens": 3})
        assert done[0] == 200, "there is room again"

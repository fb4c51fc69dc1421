"""Requests of bad or hostile clients, over real sockets: each gets one line and a 4xx, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_parts import LETTERS, PAIRS, SPECIAL, Gateway, opened, post, serving, user

HI = [user("hi")]
VOCABULARY = len(SPECIAL) + len(LETTERS) + 2 + len(PAIRS)
DEEP = b"[" * 100_000 + b"]" * 100_000


async def raw(gateway: Gateway, request: bytes) -> bytes:
    """Send these bytes, and return everything that comes back before the server closes."""
    host, port = gateway.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        answer = await reader.read()
        writer.close()
    return answer


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HI, **more}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "top_k", "seed"])
@pytest.mark.parametrize("number", [2**64, 2**200, -(2**64)])
async def test_friction_32_a_huge_number_is_refused_before_an_engine_sees_it(name: str, number: int) -> None:
    async with serving() as gateway:
        status, answer = await post(gateway, "/chat/completions", chat(**{name: number}))
        assert status == 400 and f"`$.{name}`" in answer["error"]["message"]
        assert (await post(gateway, "/chat/completions", chat()))[0] == 200


async def test_friction_41_a_key_of_odd_bytes_is_a_wrong_key() -> None:
    async with serving() as gateway:
        for key in (b"\xff\xfe", b"\x80" * 40, gateway.key.encode() + b"\xe9", b"\xed\xa0\x80"):
            request = (
                b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer %b\r\n\r\n" % key
            )
            answer = await raw(gateway, request)
            assert answer.startswith(b"HTTP/1.1 401 ") and b"invalid_api_key" in answer


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/sessions"])
async def test_friction_41_deep_json_is_refused(path: str) -> None:
    async with serving() as gateway:
        for body in (DEEP, b'{"model": "m", "messages": [{"role": "user", "content": ' + DEEP + b"}]}"):
            status, answer = await post(gateway, path, body)
            assert status == 400 and "\n" not in answer["error"]["message"]


async def test_json_that_is_just_not_too_deep_is_refused_by_the_template_or_answered() -> None:
    async with serving() as gateway:
        for depth in (50, 300, 600, 900, 990):
            tools = b'{"a": ' * depth + b"1" + b"}" * depth
            body = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [' + tools + b"]}"
            status, _ = await post(gateway, "/chat/completions", body)
            assert status in (200, 400)


@pytest.mark.parametrize("token", [VOCABULARY, 2**31 - 1, 2**31, 2**32 + 5, 2**64, 2**200])
async def test_friction_41_a_token_id_out_of_range_is_refused(token: int) -> None:
    async with serving(vocabulary=VOCABULARY) as gateway:
        status, answer = await post(gateway, "/completions", {"model": "m", "prompt": [1, token]})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        status, _ = await post(gateway, "/completions", {"model": "m", "prompt": [1, VOCABULARY - 1]})
        assert status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"model": "m", "messages": [null]}',
        b'{"model": "m", "messages": [{"role": 1, "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "\\udfff", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 1e400}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 1e30}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [1]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}',
        json.dumps(chat(stop=["x"] * 1000)).encode(),
        json.dumps(chat(stop="x" * 10_000)).encode(),
    ],
)
async def test_friction_41_odd_bodies_are_refused_with_one_line(body: bytes) -> None:
    async with serving() as gateway:
        status, answer = await post(gateway, "/chat/completions", body)
    assert status == 400 and "\n" not in answer["error"]["message"]


async def test_odd_paths_and_methods_are_refused_with_one_line() -> None:
    async with serving() as gateway:
        for line in (
            b"GET /v1/\xff\xfe",
            b"PUT /v1/models",
            b"GET /%ff%fe",
            b"POST /v1/sessions/%ff/reward",
            b"BREW /",
        ):
            head = (
                b"%b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\nAuthorization: Bearer %b\r\n\r\n"
            )
            answer = await raw(gateway, head % (line, gateway.key.encode()) + b"{}")
            assert answer.split(b" ", 2)[1] in (b"400", b"404", b"405"), (line, answer)


async def test_friction_39_a_session_s_key_opens_nothing_else() -> None:
    async with serving() as gateway:
        mine, other = opened(gateway), opened(gateway)
        assert gateway.key not in mine.key and mine.id not in mine.key and mine.key != other.key
        # What used to be the run's key: the part before a dot.
        for key in (mine.key.partition(".")[0][:-1], mine.key + "x", f"{mine.key}.{other.id}", gateway.key[:-1]):
            status, answer = await post(gateway, f"/sessions/{other.id}/reward", {"reward": 1}, key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert (await post(gateway, f"/sessions/{other.id}/reward", {"reward": 1}, mine.key))[0] == 403
        assert (await post(gateway, "/sessions", {"wait": 0}, mine.key))[0] == 403
        assert other.reward is None
        assert (await post(gateway, f"/sessions/{mine.id}/reward", {"reward": 1}, mine.key))[0] == 200


@pytest.mark.parametrize(
    "more", [b"Transfer-Encoding: chunked\r\n\r\n{}", b"Host: y\r\n\r\n", b"X: " + b"a" * 10_000 + b"\r\n\r\n"]
)
async def test_what_is_no_http_is_refused_and_not_logged(more: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as gateway:
        answer = await raw(gateway, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + more)
    assert answer.split(b" ")[1] == b"400"
    assert not caplog.records, "a client's mistake is no traceback in the run's output"

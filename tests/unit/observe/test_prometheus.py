"""The endpoint of Prometheus: its text by hand, over a real socket, and its mistakes in one line."""

from __future__ import annotations

import asyncio
import socket

import pytest

from headrace.errors import ConfigError
from headrace.observe.prometheus import MOST_BYTES, Address, Gauges, parse_address, serve_gauges

RECORDS = [
    {"kind": "step", "time": 1.0, "step": 1, "objective": "policy", "reward": 0.25, "score/a b": 1.0, "kl_k3": None},
    {"kind": "step", "time": 2.5, "step": 2, "objective": "policy", "reward": 0.5, "score/a b": 0.0, "skipped": False},
    {"kind": "group", "time": 3.0, "group": 7, "reward": 9.0},
    {"kind": "evaluation", "time": 4.0, "version": 2, "pass_1": 0.75, "moment": "after"},
    {"kind": "advice", "time": 5.0, "cause": "truncated", "step": 2, "line": "..."},
]
TEXT = r"""# TYPE headrace_advice gauge
headrace_advice{run="a \"b\"",cause="truncated"} 1.0
# TYPE headrace_evaluation_pass_1 gauge
headrace_evaluation_pass_1{run="a \"b\""} 0.75
# TYPE headrace_evaluation_version gauge
headrace_evaluation_version{run="a \"b\""} 2.0
# TYPE headrace_last_record_time_seconds gauge
headrace_last_record_time_seconds{run="a \"b\""} 4.0
# TYPE headrace_reward gauge
headrace_reward{run="a \"b\""} 0.5
# TYPE headrace_score gauge
headrace_score{run="a \"b\"",name="a b"} 0.0
# TYPE headrace_skipped gauge
headrace_skipped{run="a \"b\""} 0.0
# TYPE headrace_step gauge
headrace_step{run="a \"b\""} 2.0
"""


@pytest.fixture
def gauges() -> Gauges:
    found = Gauges('a "b"')
    for record in RECORDS:
        found.log(record)
    return found


async def ask(address: Address, request: bytes) -> tuple[str, str]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    async with asyncio.timeout(60):
        answer = (await reader.read()).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    return head.split("\r\n")[0], body


async def test_the_newest_numbers_are_served(gauges: Gauges) -> None:
    assert gauges.render() == TEXT
    async with serve_gauges(parse_address("127.0.0.1:0"), gauges, pytest.fail) as address:
        assert address is not None
        assert await ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") == ("HTTP/1.1 200 OK", TEXT)
        assert await ask(address, b"HEAD / HTTP/1.1\r\n\r\n") == ("HTTP/1.1 200 OK", "")
        assert (await ask(address, b"GET /secret HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 404 Not Found"
        assert (await ask(address, b"POST / HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 405 Method Not Allowed"
        assert await ask(address, b"\xff" * (MOST_BYTES + 5)) == ("", "")
        assert (await ask(address, b"GET / HTTP/1.1\r\n\r\n"))[1] == TEXT
    with pytest.raises(OSError):
        await asyncio.open_connection(*address)


async def test_a_port_that_is_taken_is_one_line(gauges: Gauges) -> None:
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with serve_gauges(Address("127.0.0.1", port), gauges, notes.append) as address:
            assert address is None
    [line] = notes
    assert line.startswith(f"[observe] prometheus: 127.0.0.1:{port} cannot be bound") and "\n" not in line


def test_addresses() -> None:
    assert parse_address("9400") == parse_address(":9400") == Address("127.0.0.1", 9400)
    assert parse_address("[::1]:9400") == Address("::1", 9400)
    for wrong in ("", "localhost", "127.0.0.1:", "127.0.0.1:99999", "x:-1"):
        with pytest.raises(ConfigError, match=r"\[observe\] prometheus: .* is not an address"):
            parse_address(wrong)

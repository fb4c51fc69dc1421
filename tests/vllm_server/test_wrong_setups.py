"""Each wrong setup of a vLLM server is one line that says what to change."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from engine_subjects import MAX_LENGTH, save_tiny_llama

from conftest import KEY, START_SECONDS, attach, engine_config, refused
from headrace.engines.vllm.server import VllmServer
from headrace.errors import UserError

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def start(tmp_path: Path, model: Path, *arguments: str) -> VllmServer:
    config = engine_config(arguments=["--enforce-eager", *arguments])
    server = VllmServer(model=model, config=config, log=tmp_path / "v.log", key=KEY, max_length=MAX_LENGTH)
    server.start()
    try:
        await server.ready(START_SECONDS)
    except BaseException:
        await server.stop()
        raise
    return server


WRONGLY = {
    ("--logprobs-mode", "raw_logprobs"): "start it with --logprobs-mode processed_logprobs",
    ("--worker-extension-cls", ""): "runs without Headrace's plugin: start it with --worker-extension-cls",
}


async def test_servers_that_would_answer_wrongly(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Both at once, because a start takes its time."""

    async def refuses(number: int, arguments: tuple[str, ...], line: str) -> None:
        server = await start(tmp_path / str(number), tiny_model_dir, *arguments)
        try:
            assert line in await refused(attach(server.url, tiny_model_dir))
            family = members(server.pid)
            assert len(family) >= 2
            os.kill(server.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_until_gone, server.pid, family)
            assert "the vLLM server ended (killed by signal 9)" in await refused(server.ready(10))
        finally:
            await server.stop()

    async with asyncio.TaskGroup() as both:
        for number, (arguments, line) in enumerate(WRONGLY.items()):
            both.create_task(refuses(number, arguments, line))


def wait_until_gone(group: int, family: set[int]) -> None:
    deadline = time.monotonic() + 60
    while members(group) & family:
        assert time.monotonic() < deadline, "processes of a server outlived it"
        time.sleep(0.1)


def members(group: int) -> set[int]:
    """The living processes of a process group that are not helpers of Python's own."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            command = (stat.parent / "cmdline").read_text()
        except OSError:
            continue
        if int(its_group) == group and state != "Z" and "resource_tracker" not in command:
            found.add(int(stat.parent.name))
    return found


async def test_servers_that_die_while_they_start(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path / "model", head_dim=32, hidden=64)
    unknown, long = await asyncio.gather(
        refused(start(tmp_path / "a", tmp_path / "model", "--no-such-flag")),
        refused(start(tmp_path / "b", tmp_path / "model", "--max-model-len", "999999")),
    )
    assert "unrecognized arguments: --no-such-flag" in unknown
    assert "the vLLM server ended (exit code 1)" in long and str(tmp_path / "b" / "v.log") in long
    assert "max_model_len (999999)" in long


async def test_a_port_that_is_taken(tmp_path: Path, tiny_model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = VllmServer(
            model=tiny_model_dir, config=engine_config(port=port), log=tmp_path / "v", key=KEY, max_length=MAX_LENGTH
        )
        with pytest.raises(UserError, match=rf"\[engine\] port: {port} on 127\.0\.0\.1 is taken"):
            server.start()

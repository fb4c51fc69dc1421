"""When a server counts as lost, and that its requests are then not failed but left to whoever has them next."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from link_stub import StubLink
from vllm_stub import FACTS, Stub, serving

from headrace.delivery.base import Canary, Manifest
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.serving import EventLoopServer, Opened
from headrace.engines.vllm import engine as engine_module
from headrace.engines.vllm import server as server_module
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.engine import VllmEngine
from headrace.engines.vllm.server import check_server, until_there
from headrace.errors import PeerDied, UserError

SECONDS = 60.0
Given = Callable[[str], VllmClient]


@pytest.fixture
async def given() -> AsyncIterator[Given]:
    """Makes clients, and closes them in the end."""
    async with AsyncExitStack() as clients:

        def make(url: str) -> VllmClient:
            client = VllmClient(url)
            clients.push_async_callback(client.close)
            return client

        yield make


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "AGAIN_SECONDS", 0.01)
    monkeypatch.setattr(server_module, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr("headrace.engines.serving.WATCH_SECONDS", 0.02)
    monkeypatch.setattr(engine_module, "BACKOFF_SECONDS", 0.01)


async def test_lost_is_what_refuses_connections_or_calls_itself_broken(given: Given) -> None:
    async with serving(Stub()) as stub:
        client = given(stub.url)
        await check_server(client)
        stub.statuses["/health"] = (401, {"error": "a key"})
        await check_server(client)  # It is there, whatever it thinks of us.
        stub.statuses["/health"] = (503, {"error": "its engine is dead"})
        with pytest.raises(PeerDied, match=r"vLLM died: .* answered 503: its engine is dead"):
            await check_server(client)
        del stub.statuses["/health"]
        await check_server(client)
    with pytest.raises(PeerDied, match="cannot be reached"):
        await asyncio.wait_for(check_server(client), SECONDS)


async def test_one_bad_answer_alone_is_not_a_loss(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Stub()) as stub:
        stub.statuses["/health"] = (500, {"error": "once"})

        async def recover(seconds: float) -> None:
            del stub.statuses["/health"]

        monkeypatch.setattr(server_module.asyncio, "sleep", recover)
        await check_server(given(stub.url))
        assert "/health" not in stub.statuses


async def test_a_process_that_has_ended_is_lost_before_anyone_asks(given: Given) -> None:
    class Ended:
        def check(self) -> None:
            raise UserError("the vLLM server ended (killed by signal 9): no word (vllm.log)")

    with pytest.raises(PeerDied, match="vLLM died: the vLLM server ended \\(killed by signal 9\\)"):
        await check_server(given("http://127.0.0.1:1"), Ended().check)


async def test_a_process_that_ends_meanwhile_says_why(given: Given) -> None:
    class Ending:
        asked = 0

        def check(self) -> None:
            self.asked += 1
            if self.asked > 4:  # It closes its port first.
                raise UserError("the vLLM server ended (killed by signal 9): no word (vllm.log)")

    with pytest.raises(PeerDied, match="vLLM died: the vLLM server ended \\(killed by signal 9\\)"):
        await check_server(given("http://127.0.0.1:1"), Ending().check)


async def test_a_process_that_stays_and_serves_no_more_is_lost_too(
    given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Staying:
        def check(self) -> None:
            pass

    monkeypatch.setattr(server_module, "ENDING_SECONDS", 0.05)
    with pytest.raises(PeerDied, match="cannot be reached"):
        await asyncio.wait_for(check_server(given("http://127.0.0.1:1"), Staying().check), SECONDS)


async def test_a_server_that_others_start_is_waited_for(given: Given) -> None:
    async with serving(Stub()) as stub:
        port = int(stub.url.rpartition(":")[2])
    client = given(stub.url)
    with pytest.raises(UserError, match=r"cannot be reached: .* \(waited for 0.05 s\)"):
        await until_there(client, 0.05)
    with pytest.raises(UserError, match=r"cannot be reached: [^(]*\([^(]*\)$"):
        await until_there(client, 0.0)
    waiting = asyncio.create_task(until_there(client, SECONDS))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    async with serving(Stub(), port):
        await asyncio.wait_for(waiting, SECONDS)


def manifest() -> Manifest:
    canary = Canary(token_ids=np.arange(3, dtype=np.int32), logprobs=np.full(2, -1, np.float32), tolerance=0.1)
    return Manifest(
        version=1, parent=0, step=0, transport="shm", location="", entries=[], plan_digest=7, digest=5, canary=canary
    )


@pytest.mark.parametrize("broken", [True, False])
async def test_requests_of_a_lost_server_do_not_fail(broken: bool) -> None:
    """Those of a server that is well do, once they were tried often enough."""
    async with serving(Stub()) as stub:
        deltas: list[Delta] = []

        @asynccontextmanager
        async def opened() -> AsyncIterator[Opened]:
            async with VllmClient(stub.url) as client:
                engine = VllmEngine(client, FACTS, name="e", slots=2, max_length=64)
                assert (await engine.load(manifest())).accepted
                stub.faults.extend(["break:3", *["500"] * 50])
                yield Opened(engine, lambda: check_server(client))

        link = StubLink("e", deltas.extend)
        server = EventLoopServer(link, opened)  # type: ignore[arg-type]
        link.submit([Request(id="a", token_ids=np.arange(5, dtype=np.int32), sampling=Sampling(max_tokens=20))])
        serving_it = asyncio.create_task(asyncio.to_thread(server.run))
        async with asyncio.timeout(SECONDS):
            while sum(len(delta.token_ids) for delta in deltas) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            if broken:
                stub.statuses["/health"] = (503, {"error": "dead"})
            else:
                while not any(delta.finish for delta in deltas):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                link.stop()
            (ended,) = await asyncio.gather(serving_it, return_exceptions=True)
        assert [delta.finish for delta in deltas if delta.finish] == ([] if broken else ["failed"])
        assert [int(token) for delta in deltas for token in delta.token_ids] == [5, 6, 7]
        assert isinstance(ended, PeerDied) == broken

"""The driver over a real socket: who makes way for new weights and how, what is tried again, what is refused."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm_stub import FACTS, Stub, serving

from headrace.delivery.base import Canary, Manifest
from headrace.engines.base import Delta, Interrupt, Request, Sampling
from headrace.engines.vllm.client import VllmClient
from headrace.engines.vllm.engine import EARLY_STREAMS, VllmEngine
from waiting import until

SECONDS = 60.0


class Driven:
    """An engine over a stub, and its answers by request."""

    def __init__(self, stub: Stub, engine: VllmEngine) -> None:
        self.stub = stub
        self.engine = engine
        self.deltas: dict[str, list[Delta]] = {}
        self.news = asyncio.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def ask(self, name: str, tokens: int, **sampling: Any) -> None:
        async def read() -> None:
            asked = Sampling(max_tokens=tokens, **sampling)
            request = Request(id=name, token_ids=np.arange(5, dtype=np.int32), sampling=asked)
            async for delta in self.engine.generate(request):
                self.deltas[name].append(delta)
                self.news.set()

        self.deltas[name] = []
        self.tasks[name] = asyncio.create_task(read())

    async def begun(self, name: str, tokens: int = 3) -> None:
        async with asyncio.timeout(SECONDS):
            while len(self.tokens(name)) < tokens:
                self.news.clear()
                await self.news.wait()

    async def end(self, name: str) -> Delta:
        await asyncio.wait_for(self.tasks[name], SECONDS)
        return self.deltas[name][-1]

    def tokens(self, name: str) -> list[int]:
        return [int(token) for delta in self.deltas[name] for token in delta.token_ids]

    def routing(self, name: str) -> np.ndarray:
        return np.concatenate([delta.routing for delta in self.deltas[name] if delta.routing is not None])

    def versions(self, name: str) -> list[int]:
        return [int(version) for delta in self.deltas[name] for version in delta.versions]


@asynccontextmanager
async def driven(
    interrupt: Interrupt = "never", slots: int = 2, deadline: float = SECONDS, experts: Sequence[int] = ()
) -> AsyncIterator[Driven]:
    async with serving(Stub()) as stub:
        stub.expert_layers = max(experts, default=-1) + 1
        engine = VllmEngine(
            VllmClient(stub.url, deadline=deadline),
            msgspec.structs.replace(FACTS, expert_layers=list(experts)),
            name="stub",
            slots=slots,
            max_length=4096,
            interrupt=interrupt,
            deadline=deadline,
            record_experts=True,
        )
        assert (await engine.load(manifest(1))).accepted
        yield Driven(stub, engine)
        await engine.close()


def manifest(version: int, *, plan: int = 7, score: float = -1.0) -> Manifest:
    canary = Canary(token_ids=np.arange(4, dtype=np.int32), logprobs=np.full(3, score, np.float32), tolerance=1e-3)
    return Manifest(
        version=version,
        parent=version - 1,
        step=version,
        transport="shm",
        location="nowhere",
        entries=[],
        plan_digest=plan,
        digest=5,
        canary=canary,
    )


async def test_never_goes_on_by_prefix_under_the_new_version() -> None:
    async with driven() as run:
        run.ask("a", 60)
        await run.begun("a")
        assert (await run.engine.load(manifest(2))).accepted
        assert (await run.end("a")).finish == "length"
        assert run.tokens("a") == [n % 50 for n in range(5, 65)], "no token is lost, none is drawn twice"
        assert run.versions("a") == sorted(run.versions("a")) and set(run.versions("a")) == {1, 2}
        first, second = run.stub.prompts[-2:]
        assert second[: len(first)] == first and len(second) == 5 + run.versions("a").count(1)
        assert len(set(run.stub.salts)) == 2, "the prefix cache is keyed by version"


async def test_abort_returns_what_there_is() -> None:
    async with driven("abort") as run:
        run.ask("a", 500)
        await run.begun("a")
        assert (await run.engine.load(manifest(2))).accepted
        assert (await run.end("a")).finish == "aborted" and set(run.versions("a")) == {1}


async def test_drain_lets_the_running_finish_and_the_waiting_wait() -> None:
    async with driven("drain") as run:
        for name in ("a", "b", "c"):
            run.ask(name, 40)
        await run.begun("b")
        assert (await run.engine.load(manifest(2))).accepted
        await asyncio.gather(*(run.end(name) for name in "abc"))
        assert [set(run.versions(name)) for name in "abc"] == [{1}, {1}, {2}]
        assert "/pause?mode=wait&clear_cache=false" in run.stub.calls
        assert len(run.stub.prompts) == 3, "nothing was sent twice"


async def test_block_lets_all_that_was_submitted_finish() -> None:
    async with driven("block") as run:
        for name in ("a", "b", "c"):
            run.ask(name, 40)
        await run.begun("b")
        loading = asyncio.create_task(run.engine.load(manifest(2)))
        await asyncio.sleep(0.03)
        run.ask("late", 10)
        assert (await loading).accepted
        await asyncio.gather(*(run.end(name) for name in run.tasks))
        assert [set(run.versions(name)) for name in ("a", "b", "c", "late")] == [{1}, {1}, {1}, {2}]


async def test_a_drain_that_takes_too_long_is_rejected_and_everything_goes_on() -> None:
    async with driven("drain", deadline=0.3) as run:
        run.ask("a", 300)
        await run.begun("a")
        proof = await run.engine.load(manifest(2))
        assert not proof.accepted and not proof.quarantined and "did not end in 0.3 s" in proof.reason
        run.ask("b", 5)
        assert (await run.end("b")).finish == "length" and set(run.versions("b")) == {1}
        await run.engine.abort()
        assert (await run.end("a")).finish == "aborted"


async def test_a_stream_that_breaks_goes_on_by_prefix() -> None:
    async with driven() as run:
        run.stub.faults.extend(["break:7", "500", "500", "break:0"])
        run.ask("a", 20)
        assert (await run.end("a")).finish == "length"
        assert run.tokens("a") == list(range(5, 25))
        assert [len(prompt) for prompt in run.stub.prompts] == [5, 12, 12]


async def test_trying_again_has_a_limit_and_a_refusal_is_final() -> None:
    async with driven() as run:
        run.stub.faults.append("400")
        run.ask("refused", 20)
        assert "answered 400: fault 400" in (await run.end("refused")).error and not run.stub.prompts
        run.stub.faults.extend(["500"] * 5)
        run.ask("a", 20)
        last = await run.end("a")
        assert last.finish == "failed" and "answered 500" in last.error and "\n" not in last.error
        run.ask("b", 3)
        assert (await run.end("b")).finish == "length"


async def test_tokens_under_other_weights_fail_their_request() -> None:
    async with driven() as run:
        run.ask("a", 20)
        await run.begun("a")
        run.stub.version = "9"
        last = await run.end("a")
        assert last.finish == "failed" and "under version 9 what was asked of version 1" in last.error


@pytest.mark.parametrize("wrong", ["staging", "older", "plan"])
async def test_what_is_rejected_before_the_swap_changes_nothing(wrong: str) -> None:
    async with driven() as run:
        run.stub.staging_error = "arrived wrong" if wrong == "staging" else ""
        calls = len(run.stub.calls)
        proof = await run.engine.load(manifest(1 if wrong == "older" else 2, plan=8 if wrong == "plan" else 7))
        assert not proof.accepted and not proof.quarantined and proof.reason
        assert not any("pause" in call or "update" in call for call in run.stub.calls[calls:])
        assert run.engine.counters().version == 1


@pytest.mark.parametrize("wrong", ["canary", "load"])
async def test_what_fails_after_the_swap_serves_nothing_until_a_version_is_proved(wrong: str) -> None:
    async with driven() as run:
        run.ask("a", 400)
        await run.begun("a")
        if wrong == "load":
            run.stub.statuses["/update_weight_version"] = (500, {"error": {"message": "KeyError: 'x'"}})
        proof = await run.engine.load(manifest(2, score=-1.5 if wrong == "canary" else -1.0))
        assert not proof.accepted and proof.quarantined
        assert ("off by 0.5" if wrong == "canary" else "KeyError: 'x'") in proof.reason
        run.stub.statuses.clear()
        await asyncio.sleep(0.05)
        known = run.tokens("a")
        await asyncio.sleep(0.05)
        assert run.engine.counters().version == -1 and run.tokens("a") == known
        assert (await run.engine.load(manifest(3))).accepted
        await run.begun("a", len(known) + 3)
        assert set(run.versions("a")) == {1, 3}


@pytest.mark.parametrize("proved", [True, False])
async def test_tokens_drawn_before_the_proof_are_handed_out_after_it_or_never(proved: bool) -> None:
    async with driven() as run:
        run.ask("a", 300)
        await run.begun("a")
        run.stub.may_score.clear()
        loading = asyncio.create_task(run.engine.load(manifest(2, score=-1.0 if proved else -1.5)))
        await until(lambda: len(run.stub.prompts) == 2)
        run.ask("b", 3)
        # The short request has ended, and the long one is under way.
        await until(lambda: len(run.stub.prompts) == 3 and len(run.stub.running) == run.stub.under_way == 1)
        known = run.tokens("a")
        await asyncio.sleep(0.05)
        assert set(run.versions("a")) == {1} and run.tokens("a") == known and not run.deltas["b"]
        run.stub.may_score.set()
        assert (await asyncio.wait_for(loading, SECONDS)).accepted == proved
        if not proved:
            await asyncio.sleep(0.05)
            assert run.tokens("a") == known and not run.deltas["b"]
            assert run.engine.counters().generated_tokens == len(known)
            assert (await run.engine.load(manifest(2))).accepted
        for name, count in (("a", 300), ("b", 3)):
            assert (await run.end(name)).finish == "length"
            assert run.tokens(name) == [n % 50 for n in range(5, 5 + count)]
        assert set(run.versions("a")) == {1, 2} and set(run.versions("b")) == {2}
        assert run.engine.counters().generated_tokens == 303
        # The prefix cache of weights that were not proved is not used again.
        assert len(set(run.stub.salts)) == (2 if proved else 3)


async def test_a_request_that_reaches_the_server_during_the_pause_begins_again() -> None:
    async with driven() as run:
        sent = len(run.stub.calls)
        run.stub.may_begin.clear()
        run.ask("a", 40)
        await until(lambda: "/inference/v1/generate" in run.stub.calls[sent:])
        loading = asyncio.create_task(run.engine.load(manifest(2)))
        await until(lambda: run.stub.paused)
        run.stub.may_begin.set()
        assert (await asyncio.wait_for(loading, SECONDS)).accepted
        last = await run.end("a")
        assert last.finish == "length", last.error
        assert run.tokens("a") == [n % 50 for n in range(5, 45)] and set(run.versions("a")) == {2}


async def test_most_requests_begin_again_after_the_proof() -> None:
    async with driven(slots=8) as run:
        names = [f"request {number}" for number in range(8)]
        for name in names:
            run.ask(name, 4000)
        for name in names:
            await run.begun(name)
        run.stub.may_score.clear()
        loading = asyncio.create_task(run.engine.load(manifest(2)))
        await until(lambda: run.stub.under_way == EARLY_STREAMS and not run.stub.paused)
        assert len(run.stub.prompts) == 8 + EARLY_STREAMS
        run.stub.may_score.set()
        assert (await asyncio.wait_for(loading, SECONDS)).accepted
        for name in names:
            await run.begun(name, run.versions(name).count(1) + 3)
            assert set(run.versions(name)) == {1, 2}
            assert run.tokens(name) == [n % 50 for n in range(5, 5 + len(run.tokens(name)))]
        assert len(run.stub.prompts) == 16


def experts_of(layers: Sequence[int], first: int, tokens: int) -> np.ndarray:
    """What the stub records: a token is drawn from the pass over the token before it."""
    return np.array([[[place, layer] for layer in layers] for place in range(first - 1, first - 1 + tokens)])


async def test_experts_come_with_their_tokens_through_new_weights_and_broken_streams() -> None:
    layers = (1, 3)
    async with driven(experts=layers) as run:
        run.stub.faults.append("break:4")
        run.ask("a", 60)
        await until(lambda: run.stub.under_way)
        await asyncio.sleep(0.02)
        assert (await run.engine.load(manifest(2))).accepted
        assert (await run.end("a")).finish == "length"
        assert run.tokens("a") == [n % 50 for n in range(5, 65)]
        assert (run.routing("a") == experts_of(layers, 5, 60)).all() and run.routing("a").dtype == np.int16


async def test_a_stop_that_the_server_does_not_know_brings_experts_too() -> None:
    async with driven(experts=(0,)) as run:
        run.ask("a", 300, stop_sequences=((11, 12),))
        assert (await run.end("a")).finish == "stop" and run.tokens("a") == list(range(5, 13))
        assert (run.routing("a") == experts_of((0,), 5, 8)).all()


async def test_tokens_without_their_experts_are_drawn_again() -> None:
    async with driven(experts=(0,)) as run:
        run.stub.lost_experts = 1
        run.ask("a", 10)
        assert (await run.end("a")).finish == "length" and run.tokens("a") == list(range(5, 15))
        assert (run.routing("a") == experts_of((0,), 5, 10)).all() and len(run.stub.prompts) == 2


@pytest.mark.parametrize(
    ("second", "quarantined", "reason"),
    [
        ({"headrace_staged": {"error": "version 2 arrived wrong"}}, False, "version 2 arrived wrong"),
        ({"headrace_stage": {"error": "version 1 is under way"}}, False, "version 1 is under way"),
        ({"headrace_load": {"wrong": ["q_proj"]}}, True, "the live weights differ from what was staged: q_proj"),
        ({"headrace_load": {"missing": ["norm"]}}, True, "version 2 does not fill norm"),
        ({"headrace_load": {"error": "gone"}}, True, "version 2 changed while it was loaded: gone"),
    ],
)
async def test_a_version_is_proved_only_if_all_workers_prove_it(
    second: dict[str, dict[str, object]], quarantined: bool, reason: str
) -> None:
    async with driven() as run:
        run.stub.second = second
        proof = await run.engine.load(manifest(2))
        assert (proof.accepted, proof.quarantined, proof.reason) == (False, quarantined, reason)
        run.stub.second = {method: {} for method in second}
        assert (await run.engine.load(manifest(3))).accepted

"""The controller's side of the gateway: batches of messages, and what follows when the gateway's process dies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_parts import END, fake_engine, post, relayed, until, user

from headrace.engines.base import Sampling
from headrace.errors import PeerDied, UserError
from headrace.gateway.base import GATEWAY_DIED
from headrace.gateway.episode import AgentEpisode
from headrace.gateway.relay import Relay, checked_key
from headrace.rollouts.base import EpisodePlan
from headrace.types import Prompt, Rollout


def started(relay: Relay, index: int = 0, **data: Any) -> asyncio.Task[Rollout]:
    prompt = Prompt(id=f"p{index}", messages=[user("hi")], data=data)
    plan = EpisodePlan(
        id=f"1/{index}", index=index, prompt=prompt, group="1",
        sampling=Sampling(max_tokens=1000, seed=index, stop_token_ids=(END,)),
    )  # fmt: skip
    return asyncio.create_task(AgentEpisode(plan, relay=relay).run())


async def taken(relay: Relay) -> dict[str, Any]:
    status, session = await post(relay, "/sessions", {"wait": 20})
    assert status == 200
    return session


async def test_the_key_file_is_private_and_goes_with_the_run(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    async with relayed(file=file) as relay:
        assert json.loads(file.read_text()) == {"base_url": relay.base_url, "api_key": relay.key}
        assert file.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UserError, match=rf"^\[gateway\] port: cannot listen on 127.0.0.1:{relay.port}"):
            async with relayed(port=relay.port):
                pass
    assert not file.exists()
    with pytest.raises(UserError, match="HEADRACE_GATEWAY_KEY: a key is at least 16 ASCII characters"):
        checked_key("short")


async def test_tokens_travel_in_batches_and_arrive_as_they_were_sampled() -> None:
    async with relayed(fake_engine(lengths=[60], token_seconds=0.001), max_length=2000) as relay:
        running = [started(relay, index) for index in range(8)]
        sessions = [await taken(relay) for _ in running]

        async def work(session: dict[str, Any]) -> int:
            ask = {"model": "m", "messages": session["prompt"]["messages"], "n": 2, "max_tokens": 60}
            _, answer = await post(relay, "/chat/completions", ask, session["api_key"])
            await post(relay, f"/sessions/{session['id']}/reward", {"reward": 1}, session["api_key"])
            return int(answer["usage"]["completion_tokens"])

        async with asyncio.timeout(60):
            counted = await asyncio.gather(*map(work, sessions))
            rollouts = await asyncio.gather(*running)
        assert [rollout.ending for rollout in rollouts] == ["finished"] * 8
        assert sorted(rollout.trained_tokens for rollout in rollouts) == sorted(counted) == [120] * 8
        assert all(len(rollout.traces) == 2 for rollout in rollouts), "two answers to one request"
        assert relay.wire.sent < sum(counted) / 2, "not a message for every token"
        assert relay.open_sessions == 0


async def test_data_of_a_prompt_may_hold_any_json() -> None:
    async with relayed() as relay:
        episode = started(relay, huge=2**200, text="é\u2028", none=None)
        session = await taken(relay)
        assert session["prompt"]["data"] == {"huge": 2**200, "text": "é\u2028", "none": None}
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)


async def test_when_the_gateway_dies_its_sessions_fail_and_the_others_are_offered_again() -> None:
    engine = fake_engine(lengths=[100_000], token_seconds=0.002)
    async with relayed(engine, max_length=10**6) as relay:
        wire, address = relay.wire, relay.base_url
        begun, waiting = started(relay, 0), started(relay, 1)
        first = await taken(relay)
        ask = {"model": "m", "messages": [user("hi")], "max_tokens": 1000}
        asking = asyncio.create_task(post(relay, "/chat/completions", ask, first["api_key"]))
        await until(lambda: engine.counters().running == 1)

        await wire.die()
        relay.lost("killed by signal 9")
        rollout = await begun
        assert (rollout.ending, rollout.reason) == ("failed", f"{GATEWAY_DIED} (killed by signal 9)")
        await until(lambda: engine.counters().running == 0)
        later = started(relay, 2)
        with pytest.raises(PeerDied):
            await relay.back()
        await asyncio.gather(asking, return_exceptions=True)

        wire.begin()
        await relay.back()
        assert relay.base_url == address
        for index in (1, 2):
            session = await taken(relay)
            assert session["prompt"]["id"] == f"p{index}" and session["base_url"] == address
            ask["max_tokens"] = 3
            assert (await post(relay, "/chat/completions", ask, session["api_key"]))[0] == 200
            assert (await post(relay, "/chat/completions", ask, first["api_key"]))[0] == 401, "it is not open any more"
            assert (await post(relay, f"/sessions/{session['id']}/reward", {"reward": index}))[0] == 200
        async with asyncio.timeout(20):
            assert [(r.ending, r.reward) for r in await asyncio.gather(waiting, later)] == [
                ("finished", 1.0), ("finished", 2.0),
            ]  # fmt: skip


async def test_a_gateway_that_does_not_answer_is_noticed() -> None:
    async with relayed() as relay:
        assert relay.silent_for() == 0.0
        relay.wire.send = never  # type: ignore[method-assign]
        episode = started(relay)
        await until(lambda: relay.silent_for() > 0.05)
        relay.lost("it did not answer")
        assert relay.silent_for() == 0.0
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)


async def never(peer: str, message: object) -> None:
    """A process that hangs."""

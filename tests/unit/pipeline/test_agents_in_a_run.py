"""Agents' sessions under the real controller: groups, ledgers, lag and batches are those of any other rollout."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from controller_parts import FakeRun
from openai import APIError, AsyncOpenAI

from headrace.buffer.reader import open_readonly
from headrace.channel.events import Died, Returned
from headrace.errors import HeadraceError, PeerDied
from headrace.gateway.base import GATEWAY_DIED
from headrace.gateway.episode import AgentEpisode
from headrace.gateway.relay import Relay
from headrace.tasks.chat import ChatFormat
from inner_gateway import both_sides
from waiting import until

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"


@asynccontextmanager
async def with_gateway(run: FakeRun, seconds: float) -> AsyncIterator[Relay]:
    """The run's own pool, behind a gateway that offers its sessions to agents from outside."""
    parts = run.controller.parts
    async with both_sides(parts.pool, ChatFormat.load(MODEL), session_seconds=seconds) as relay:
        parts.gateway, parts.agents = relay, partial(AgentEpisode, relay=relay)
        yield relay


async def two_turns(relay: Relay, session: dict[str, Any]) -> None:
    async with AsyncOpenAI(base_url=relay.base_url, api_key=session["api_key"], max_retries=0) as api:
        history, sampled = list(session["prompt"]["messages"]), 0
        for _ in range(2):
            answer = await api.chat.completions.create(model="m", messages=history)
            history += [answer.choices[0].message, {"role": "user", "content": "again"}]
            sampled += answer.usage.completion_tokens if answer.usage else 0
        await api.post(f"/sessions/{session['id']}/reward", body={"reward": float(sampled % 2)}, cast_to=dict)


async def serve_agents(relay: Relay, *, deaf: int, took: list[str] | None = None) -> None:
    """Agents from outside, one after the other; every `deaf`-th takes its session and is never heard of again.

    `took` gets the ids of the sessions.
    """
    number = 0
    async with AsyncOpenAI(base_url=relay.base_url, api_key=relay.key) as api:
        while True:
            try:
                session = await api.post("/sessions", body={"wait": 5}, cast_to=dict)
            except APIError:
                continue  # Nothing was offered, or the gateway has died.
            number += 1
            if took is not None:
                took.append(session["id"])
            if number % deaf:
                # The session, or the whole run, may be over by now.
                with suppress(APIError):
                    await two_turns(relay, session)


async def test_friction_49_agents_are_evaluated_on_one_version_and_54_trained_at_their_temperature(
    tmp_path: Path,
) -> None:
    settings = ["run.versions=4", "evaluate.prompts=3", "evaluate.every=2", "rollouts.temperature=0.5"]
    run = FakeRun(tmp_path, *settings, "rollouts.max_tokens=40", engine={"lengths": [3, 5]}, heldout=3)
    async with with_gateway(run, seconds=20.0) as relay:
        agents = [asyncio.create_task(serve_agents(relay, deaf=10**6)) for _ in range(4)]
        try:
            await run.run()
        finally:
            for agent in agents:
                agent.cancel()
    rows = run.journal("SELECT version, versions FROM evaluations ORDER BY started")
    assert [row["version"] for row in rows] == [0, 2, 4]
    assert [list(json.loads(row["versions"])) for row in rows] == [["0"], ["2"], ["4"]]
    assert [(batch.temperature, batch.temperatures) for batch in run.trainer.batches] == [(0.5, None)] * 4
    with open_readonly(run.path / "journal.db") as journal:
        [first, *_] = journal.trained_groups(1)
    assert {temperature for _, temperature in first.rollouts[0].traces[0].temperatures} == {0.5}


async def test_sessions_are_trained_and_those_without_a_reward_fail_in_the_ledger(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path, "run.versions=3", "rollouts.group_size=4", "rollouts.max_tokens=40", engine={"lengths": [3, 5]}
    )
    async with with_gateway(run, seconds=1.0) as relay:
        agents = asyncio.create_task(serve_agents(relay, deaf=7))
        try:
            await run.run()
        finally:
            agents.cancel()
    groups, rollouts = run.recorder.ledgers.as_dict()["groups"], run.recorder.ledgers.as_dict()["rollouts"]
    assert (groups["trained"], groups["in_flight"]) == (6, 0)
    assert rollouts["failed"] >= 2
    assert rollouts["reasons"]["failed"] == {"no reward within 1 s ([task] timeout)": rollouts["failed"]}
    assert rollouts["admitted"] == rollouts["trained"] + rollouts["dropped"] + rollouts["failed"]
    lags = np.concatenate([batch.lags() for batch in run.trainer.batches])
    assert lags.min() >= 0 and lags.max() <= run.window.lag_bound
    for batch in run.trainer.batches:
        ends = np.cumsum(batch.lengths)
        for start, end in zip(ends - batch.lengths, ends, strict=True):
            trained = batch.trained[start:end]
            # Two turns: sampled tokens, what the agent said, sampled tokens.
            assert np.count_nonzero(np.diff(trained.astype(int)) == 1) == 2 and trained[-1]
            assert (batch.versions[start:end][trained] >= 0).all()


async def test_agents_that_never_earn_anything_end_the_run_with_the_reason(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "run.versions=3", "buffer.groups=2")
    async with with_gateway(run, seconds=0.02) as relay:
        agents = asyncio.create_task(serve_agents(relay, deaf=1))
        try:
            with pytest.raises((HeadraceError, ExceptionGroup)) as caught:
                await run.run()
        finally:
            agents.cancel()
    error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
    assert "groups all failed, the last one because: no reward within 0.02 s ([task] timeout)" in str(error)


async def kill_gateway(run: FakeRun, relay: Relay) -> None:
    """The gateway's process dies and is started again."""
    await relay.wire.die()
    run.events.put(Died(PeerDied(relay.name, "killed"), restarts=True))
    await until(lambda: not relay.serving, 20)
    relay.wire.begin()
    run.events.put(Returned(relay.name))
    await until(lambda: relay.serving, 20)


@pytest.mark.parametrize("heldout", [0, 3])
async def test_a_gateway_that_dies_again_and_again_fails_its_sessions_and_not_the_run(
    tmp_path: Path, heldout: int
) -> None:
    run = FakeRun(
        tmp_path, "run.versions=2", "rollouts.max_tokens=40", "buffer.groups=10", "buffer.depth=1",
        engine={"lengths": [3, 5]}, heldout=heldout,
    )  # fmt: skip
    # A death fails all groups under way, or all held-out prompts.
    sessions = heldout or 2 * run.window.capacity
    async with with_gateway(run, seconds=20.0) as relay:
        tasks: list[asyncio.Task[None]] = []

        async def kill_twice() -> None:
            for _ in range(2):
                idle: list[str] = []
                tasks.append(asyncio.create_task(serve_agents(relay, deaf=1, took=idle)))
                await until(lambda idle=idle: len(idle) == sessions, 20)  # type: ignore[misc]
                tasks[-1].cancel()
                await kill_gateway(run, relay)
            tasks.append(asyncio.create_task(serve_agents(relay, deaf=10**9)))

        tasks.append(asyncio.create_task(kill_twice()))
        try:
            await run.run()
        finally:
            for task in tasks:
                task.cancel()
    ledger = run.recorder.ledgers.as_dict()
    assert ledger["groups"]["trained"] == 20
    if heldout:
        assert ledger["rollouts"]["failed"] == 0, "held-out prompts were asked again"
    else:
        assert ledger["rollouts"]["failed"] >= 2 * sessions
        assert ledger["rollouts"]["reasons"]["failed"] == {f"{GATEWAY_DIED} (killed)": ledger["rollouts"]["failed"]}

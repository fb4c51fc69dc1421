"""Agents' sessions under the real controller: groups, ledgers, lag and batches are those of any other rollout."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from controller_parts import FakeRun
from openai import APIStatusError, AsyncOpenAI

from headrace.errors import HeadraceError
from headrace.gateway.base import Reward
from headrace.gateway.gateway import Gateway
from headrace.gateway.session import Session
from headrace.tasks.chat import ChatFormat

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"


def with_gateway(run: FakeRun, seconds: float) -> Gateway:
    """The run's own pool, behind a gateway that offers its sessions to agents from outside."""
    gateway = Gateway(
        run.controller.parts.pool, ChatFormat.load(MODEL), model="m", max_length=200, max_tokens=40, max_turns=4,
        session_seconds=seconds,
    )  # fmt: skip
    run.controller.parts.agents = gateway.episode
    return gateway


async def two_turns(gateway: Gateway, session: Session) -> None:
    key = gateway.job(session).api_key
    async with AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0) as api:
        history = list(session.prompt.messages or [])
        for _ in range(2):
            answer = await api.chat.completions.create(model="m", messages=history)
            history += [answer.choices[0].message, {"role": "user", "content": "again"}]
    session.settle(Reward(reward=float(session.conversation.sampled % 2)))


async def serve_agents(gateway: Gateway, *, deaf: int) -> None:
    """Agents from outside, one after the other; every `deaf`-th takes its session and is never heard of again."""
    number = 0
    while True:
        session = await gateway.sessions.take(5.0, 1.0)
        number += 1
        if session is not None and number % deaf:
            # The run may be over by now.
            try:
                await two_turns(gateway, session)
            except APIStatusError:
                return


async def test_sessions_are_trained_and_those_without_a_reward_fail_in_the_ledger(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path, "run.versions=3", "rollouts.group_size=4", "rollouts.max_tokens=40", engine={"lengths": [3, 5]}
    )
    gateway = with_gateway(run, seconds=1.0)
    await gateway.start()
    agents = asyncio.create_task(serve_agents(gateway, deaf=7))
    try:
        await run.run()
    finally:
        agents.cancel()
        await gateway.close()
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
    gateway = with_gateway(run, seconds=0.02)
    await gateway.start()

    async def take_and_leave() -> None:
        while True:
            await gateway.sessions.take(5.0, 0.02)

    agents = asyncio.create_task(take_and_leave())
    try:
        with pytest.raises((HeadraceError, ExceptionGroup)) as caught:
            await run.run()
    finally:
        agents.cancel()
        await gateway.close()
    error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
    assert "groups all failed, the last one because: no reward within 0.02 s ([task] timeout)" in str(error)

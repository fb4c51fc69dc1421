from __future__ import annotations

import asyncio
import functools

import pytest
from rollout_parts import Script, done, episode, until

from headrace.engines.fake import FakeEngine
from headrace.rollouts.base import derive_seed
from headrace.rollouts.groups import cancel_group, prepare_group, run_group
from headrace.rollouts.turns import Episode
from headrace.scoring.base import Stage
from headrace.types import Group, Prompt
from lengths import lognormal_lengths


def group() -> Group:
    return Group(id=9, prompt=Prompt(id="p", text="q"), version=1)


async def test_a_group_is_complete_when_every_rollout_has_ended() -> None:
    engine = FakeEngine(version=1, lengths=[30, 3, 11, 7], fail_requests={"9/2/0": 2})
    environments = [Script(done(i / 4)) for i in range(3)] + [Script(RuntimeError("no"))]
    episodes = [episode(environment, engine, index=i, seed=i) for i, environment in enumerate(environments)]
    await prepare_group(episodes)
    asked = group()
    complete = await asyncio.wait_for(run_group(asked, episodes[::-1], Stage()), 60)
    assert [r.index for r in complete.rollouts] == [0, 1, 2, 3]
    assert [r.ending for r in complete.rollouts] == ["finished", "finished", "failed", "failed"]
    assert [r.reward for r in complete.rollouts] == [0.0, 0.25, None, None]
    assert [r.trained_tokens for r in complete.rollouts] == [30, 3, 2, 7]
    assert len(complete.usable) == 2 and asked.rollouts == []
    assert [e.closed for e in environments] == [1, 1, 1, 1]


async def test_cancelling_a_group_yields_what_there_is() -> None:
    engine = FakeEngine(version=1, lengths=[5, 10_000, 10_000], slots=2)
    environments = [Script(done()) for _ in range(3)]
    episodes = [episode(e, engine, index=i, max_tokens=20_000) for i, e in enumerate(environments)]
    await prepare_group(episodes)
    running = asyncio.create_task(run_group(group(), episodes, Stage()))
    await until(lambda: len(episodes[2].traces[0]) >= 30)
    await cancel_group(episodes, "its lag is over the limit")
    complete = await asyncio.wait_for(running, 60)
    assert [r.ending for r in complete.rollouts] == ["finished", "aborted", "aborted"]
    assert [r.reason for r in complete.rollouts] == ["", *["its lag is over the limit"] * 2]
    stats = engine.counters()
    assert stats.running == stats.waiting == 0
    assert stats.generated_tokens == sum(r.trained_tokens for r in complete.rollouts)
    assert [e.closed for e in environments] == [1, 1, 1]


async def test_cancelling_the_task_frees_the_requests_and_closes_the_environments() -> None:
    engine = FakeEngine(version=1, lengths=[10_000])
    environments = [Script(done()) for _ in range(3)]
    episodes = [episode(e, engine, index=i, max_tokens=20_000) for i, e in enumerate(environments)]
    await prepare_group(episodes)
    running = asyncio.create_task(run_group(group(), episodes, Stage()))
    await until(lambda: len(episodes[0].traces[0]) >= 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(running, 60)
    stats = engine.counters()
    assert stats.running == stats.waiting == 0
    assert all(len(one.traces[0]) >= 30 for one in episodes)
    assert [e.closed for e in environments] == [1, 1, 1]


async def test_a_group_cancelled_as_it_starts_is_closed_too() -> None:
    environments = [Script(done()) for _ in range(2)]
    episodes = [episode(e, index=i) for i, e in enumerate(environments)]
    await prepare_group(episodes)
    running = asyncio.create_task(run_group(group(), episodes, Stage()))
    asyncio.get_running_loop().call_soon(running.cancel)
    await asyncio.wait([running], timeout=60)
    assert running.cancelled() and [e.closed for e in environments] == [1, 1]


async def test_a_group_whose_task_never_began_is_closed_by_discarding_it() -> None:
    environments = [Script(done()) for _ in range(2)]
    episodes = [episode(e, index=i) for i, e in enumerate(environments)]
    await prepare_group(episodes)
    running = asyncio.create_task(run_group(group(), episodes, Stage()))
    running.cancel()
    await asyncio.wait([running], timeout=60)
    for one in episodes:
        await one.discard()
    assert running.cancelled() and [e.closed for e in environments] == [1, 1]


async def test_cancelled_preparation_leaves_no_environment_open() -> None:
    environments = [Script(), Script(opening=60.0)]
    preparing = asyncio.create_task(prepare_group([episode(e, index=i) for i, e in enumerate(environments)]))
    await asyncio.sleep(0.01)
    preparing.cancel()
    await asyncio.wait([preparing], timeout=60)
    assert preparing.cancelled() and [e.closed for e in environments] == [1, 1]


@pytest.mark.parametrize("delays", [[0.02, 0.0, 0.01, 0.0], [0.0, 0.03, 0.0, 0.01]], ids=str)
async def test_the_engine_sees_requests_in_the_order_of_the_calls_however_long_environments_take(
    delays: list[float],
) -> None:
    engine = FakeEngine(version=1, lengths=lognormal_lengths(10), slots=1)
    prompt = Prompt(id="p", text="q")
    ended: list[str] = []

    def member(g: int, i: int) -> Episode:
        environment = Script(done(), opening=delays[2 * g + i])
        environment.close = functools.partial(_note, ended, f"{g}/{i}")  # type: ignore[method-assign]
        return episode(environment, engine, id=f"{g}/{i}", index=i, prompt=prompt)

    groups = [[member(g, i) for i in range(2)] for g in range(2)]
    await asyncio.wait_for(asyncio.gather(*(prepare_group(episodes) for episodes in groups)), 60)
    tasks = [asyncio.create_task(run_group(group(), episodes, Stage())) for episodes in groups]
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert ended == ["0/0", "0/1", "1/0", "1/1"], "one slot serves them in the order in which they came"


async def _note(ended: list[str], id: str) -> None:
    ended.append(id)


def test_seeds_are_stable_and_spread() -> None:
    assert derive_seed(0, 0, 0) == 759540517790923586
    assert derive_seed(1, "p7", 2) == 5882554197007254605
    seeds = {derive_seed(r, g, i) for r in range(3) for g in range(20) for i in range(20)}
    assert len(seeds) == 1200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62

"""Agents in processes of their own, through a real server, to rollouts: every end an agent can come to."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_parts import END, fake_engine, post, relayed, until

from headrace.engines.base import Sampling
from headrace.errors import ConfigError
from headrace.gateway.agent_main import AgentSetup
from headrace.gateway.agents import AgentPool
from headrace.gateway.episode import AgentEpisode
from headrace.gateway.relay import Relay
from headrace.rollouts.base import EpisodePlan
from headrace.rollouts.groups import run_episode
from headrace.scoring.base import Ended, Scorer, Span, Stage
from headrace.types import Prompt, Rollout, Score, Trace
from waiting import alive

HERE = Path(__file__).parent
AGENTS = HERE / "agents_for_tests.py"


@asynccontextmanager
async def pool(function: str = "behave", command: list[str] | None = None, **more: Any) -> AsyncIterator[AgentPool]:
    setup = AgentSetup(command=command) if command else AgentSetup(function=f"{AGENTS}:{function}")
    agents = AgentPool(setup, workers=1, concurrency=8, **more)
    try:
        await agents.start()
        yield agents
    finally:
        await agents.close()


def episode(
    relay: Relay,
    way: str = "",
    *,
    index: int = 0,
    mark: str = "",
    max_tokens: int = 40,
    scoring: Stage | None = None,
) -> AgentEpisode:
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "hi"}], data={"way": way, "data_": 1, "mark": mark})
    sampling = Sampling(max_tokens=max_tokens, seed=index)
    plan = EpisodePlan(id=f"9/{index}", index=index, prompt=prompt, sampling=sampling, group="9")
    return AgentEpisode(plan, scoring, relay=relay)


async def test_what_an_agent_had_come_to_is_discarded_in_all_its_traces() -> None:
    nothing = Trace.of_context(np.arange(3, dtype=np.int32))
    saved = [nothing.extended([5] * n, [-1.0] * n, [0] * n, trained=True) for n in (4, 2)]
    async with relayed() as gateway:
        plan = EpisodePlan(id="9/0", index=0, prompt=Prompt(id="p"), sampling=Sampling(max_tokens=8), saved=saved)
        again = AgentEpisode(plan, relay=gateway)
    assert (again.discarded, list(again.traces), again.answer) == (6, [], "")


async def ended(*episodes: AgentEpisode) -> list[Rollout]:
    for one in episodes:
        await one.prepare()
    async with asyncio.timeout(30):
        return list(await asyncio.gather(*(one.run() for one in episodes)))


def processes_with(mark: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in command and alive(process.name):
            found.append(process.name)
    return found


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_every_way_an_agent_can_end_is_a_rollout() -> None:
    ways = ["number", "metrics", "posts", "both", "nothing", "nan", "text", "raises", "silent"]
    async with pool() as agents, relayed(agents=agents) as gateway:
        rollouts = await ended(*(episode(gateway, way, index=n) for n, way in enumerate(ways)))
        assert gateway.open_sessions == 0
    found = {way: (r.ending, r.reward, r.reason) for way, r in zip(ways, rollouts, strict=True)}
    assert found == {
        "number": ("finished", 0.25, ""),
        "metrics": ("finished", 0.5, ""),
        "posts": ("finished", 0.75, ""),
        "both": ("failed", None, "the agent posted the reward 0.75 and returned 1"),
        "nothing": ("failed", None, "the agent ended without a reward"),
        "nan": ("failed", None, "the agent's reward is nan, not a finite number"),
        "text": ("failed", None, "the agent returned 'good', not a reward"),
        "raises": ("failed", None, found["raises"][2]),
        "silent": ("failed", None, "the agent has a reward, but made no request in its session"),
    }
    assert found["raises"][2].startswith("the agent raised RuntimeError: no luck (agents_for_tests.py, line ")
    assert rollouts[1].metrics == {"turns": 1.0, "traces": 1.0, "steps": 3.0}
    for rollout in rollouts[:3]:
        (trace,) = rollout.traces
        assert trace.trained_tokens in (4, 5, 7) and trace.token_ids[-1] == END
        np.testing.assert_array_equal(trace.versions[trace.trained], 3)


async def test_friction_40_an_agent_that_raises_what_is_no_exception_is_answered() -> None:
    async with pool() as agents, relayed(agents=agents) as gateway:
        cancels, interrupts = await ended(episode(gateway, "cancels"), episode(gateway, "interrupts", index=1))
        assert cancels.reason.startswith("the agent raised CancelledError: gave up (agents_for_tests.py, line ")
        assert interrupts.reason.startswith("the agent raised KeyboardInterrupt")
        (later,) = await ended(episode(gateway, "number", index=2))
        assert later.reward == 0.25


async def test_the_budget_used_up_is_a_truncated_rollout_without_a_reward() -> None:
    async with pool() as agents, relayed(fake_engine(lengths=[6]), agents=agents) as gateway:
        (rollout,) = await ended(episode(gateway, "insists", max_tokens=10))
    assert (rollout.ending, rollout.reward) == ("truncated", 0.0)
    assert rollout.trained_tokens == 10


async def test_an_agent_that_hangs_fails_alone_and_is_killed_with_all_it_started() -> None:
    mark = f"mark-{time.monotonic_ns()}"
    async with pool() as agents, relayed(agents=agents, session_seconds=4.0) as gateway:
        hanging, good = await ended(episode(gateway, "hangs", mark=mark), episode(gateway, "number", index=1))
        assert (hanging.ending, hanging.reason) == ("failed", "no reward within 4 s ([task] timeout)")
        assert hanging.trained_tokens > 0, "what it sampled is kept for the record"
        assert good.reward == 0.25
        await until(lambda: not processes_with(mark))
        (later,) = await ended(episode(gateway, "number", index=2))
        assert later.reward == 0.25, "a fresh worker has taken the place"


async def test_an_agent_that_takes_its_process_along_fails_what_ran_in_it() -> None:
    async with pool() as agents, relayed(agents=agents) as gateway:
        (rollout,) = await ended(episode(gateway, "dies"))
        assert rollout.reason == "the agent's process died (signal SIGKILL)"
        (later,) = await ended(episode(gateway, "number"))
        assert later.reward == 0.25


async def test_async_agents_and_arguments_by_name() -> None:
    async with pool("slow") as agents, relayed(agents=agents) as gateway:
        assert [r.reward for r in await ended(*(episode(gateway, index=n) for n in range(12)))] == [1.0] * 12
    async with pool("wants_more") as agents, relayed(agents=agents) as gateway:
        (rollout,) = await ended(episode(gateway))
    assert rollout.reason == "the agent wants 'nowhere', which is neither given nor a field of the prompt"


async def test_an_agent_that_cannot_be_used_is_said_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"\[task\] agent: .* has no 'missing'"):
        async with pool("missing"):
            pass


class Hears(Scorer):
    """Writes down what it is told of agents."""

    def __init__(self) -> None:
        self.spans: dict[str, list[Span]] = {}
        self.forgotten: list[str] = []

    def span(self, span: Span) -> None:
        self.spans.setdefault(span.rollout, []).append(span)

    async def score(self, ended: Ended) -> list[Score]:
        return [Score(value=float(sum(len(span.token_ids) for span in self.spans[ended.rollout.id])))]

    def forget(self, rollout_id: str) -> None:
        self.forgotten.append(rollout_id)


async def test_scorers_are_told_of_the_tokens_of_agents() -> None:
    hears = Hears()
    stage = Stage({"hears": hears}, {"agent": 0.0})
    async with pool() as agents, relayed(agents=agents) as gateway:
        made = [episode(gateway, way, index=n, scoring=stage) for n, way in enumerate(("number", "raises", "silent"))]
        async with asyncio.timeout(30):
            good, raised, silent = await asyncio.gather(*(run_episode(one, stage) for one in made))
    (trace,) = good.traces
    spans = hears.spans[good.id]
    assert [(span.trace, span.turn, span.start) for span in spans] == [(None, 0, 0), (None, 0, len(spans[0].token_ids))]
    assert np.concatenate([span.token_ids for span in spans]).tolist() == trace.token_ids.tolist()
    assert np.concatenate([span.tokens.versions for span in spans]).tolist() == trace.versions.tolist()
    assert (good.ending, good.reward) == ("finished", float(len(trace)))
    assert (raised.ending, silent.ending) == ("failed", "failed")
    assert hears.forgotten == [raised.id], "it was told of, and will not be scored"


COMMAND = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from agents_for_tests import ask, chat
told = json.load(sys.stdin)
if told["way"] == "hangs":
    import time
    time.sleep(600)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
chat(url, key, told["messages"])
if told["way"] == "fails":
    sys.exit(7)
ask(url, key, "/sessions/" + os.environ["HEADRACE_SESSION"] + "/reward", {"reward": 2.5})
"""


async def test_commands_post_their_reward() -> None:
    mark = f"mark-{time.monotonic_ns()}"
    command = [sys.executable, "-c", COMMAND, str(HERE), mark]
    async with pool(command=command) as agents, relayed(agents=agents, session_seconds=5.0) as gateway:
        good, bad = await ended(episode(gateway, "posts"), episode(gateway, "fails", index=1))
        assert (good.ending, good.reward) == ("finished", 2.5)
        assert (bad.ending, bad.reason) == ("failed", "the agent's command ended with exit code 7")
        cancelled = episode(gateway, "hangs", index=2)
        running = asyncio.create_task(cancelled.run())
        async with asyncio.timeout(20):
            await until(lambda: bool(processes_with(mark)))
            await cancelled.cancel("interrupted")
            rollout = await running
            await until(lambda: not processes_with(mark))
    assert (rollout.ending, rollout.reason) == ("aborted", "interrupted")


OWNER = """
import asyncio, os, sys
from headrace.gateway.agents import AgentPool
from headrace.gateway.agent_main import Job, AgentSetup

async def main():
    setup = AgentSetup(command=[sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
    if sys.argv[2] != "command":
        setup = AgentSetup(function=sys.argv[2])
    pool = AgentPool(setup, workers=1, concurrency=1)
    await pool.start()
    data = {"mark": sys.argv[1], "way": "hangs"}
    job = Job(base_url="", api_key="", model="", session="a", prompt="p", messages=[], data=data)
    running = asyncio.create_task(pool.run(job))
    print("started", flush=True)
    await running

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["command", f"{AGENTS}:sleeps"])
async def test_agents_do_not_outlive_a_run_that_is_killed(kind: str) -> None:
    mark = f"mark-{time.monotonic_ns()}"
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, mark, kind), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    async with asyncio.timeout(30):
        await owner.stdout.readline()
        workers = children(owner.pid)
        if kind == "command":
            await until(lambda: len(processes_with(mark)) == 2)
        owner.kill()
        await owner.wait()
    assert workers
    await until(lambda: not processes_with(mark) and not any(map(alive, workers)))


async def test_agents_from_outside_take_sessions_in_turn() -> None:
    async with relayed(session_seconds=3.0) as gateway:
        status, answer = await post(gateway, "/sessions", {"wait": 0.05})
        assert (status, answer["error"]["code"]) == (503, "no_session")
        running = [asyncio.create_task(episode(gateway, f"w{n}", index=n).run()) for n in range(2)]
        _, first = await post(gateway, "/sessions", {})
        _, second = await post(gateway, "/sessions", b"")
        assert [told["prompt"]["data"]["way"] for told in (first, second)] == ["w0", "w1"]
        assert first["base_url"] == gateway.base_url
        ask = {"model": "tiny", "messages": first["prompt"]["messages"]}
        assert (await post(gateway, "/chat/completions", ask, first["api_key"]))[0] == 200
        assert (await post(gateway, f"/sessions/{first['id']}/reward", {"reward": 0.5}, first["api_key"]))[0] == 200
        async with asyncio.timeout(20):
            good, late = await asyncio.gather(*running)
        assert (good.ending, good.reward, late.ending) == ("finished", 0.5, "failed")
        assert late.reason == "no reward within 3 s ([task] timeout)"
        status, answer = await post(gateway, f"/sessions/{second['id']}/reward", {"reward": 1})
        assert status == 404 and "it may have ended" in json.dumps(answer)

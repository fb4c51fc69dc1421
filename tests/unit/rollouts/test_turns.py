from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator

import numpy as np
import pytest
from rollout_parts import ASSISTANT, END, OPEN, USER, Script, TinyChat, done, episode, says, until

from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.fake import FakeEngine
from headrace.engines.fake_policy import FakePolicy
from headrace.errors import PeerDied
from headrace.rollouts.turns import FRUITLESS_RESUMES, Episode
from headrace.tasks.base import EnvironmentStep
from headrace.types import NO_VERSION, Prompt, Rollout

OPENING = [OPEN, USER, ord("h") % 59, ord("i") % 59, END, ASSISTANT]


def _longer(one: Episode, length: int) -> bool:
    return len(one.traces[0]) >= length


async def run(one: Episode) -> Rollout:
    async with asyncio.timeout(20):
        await one.prepare()
        return await one.run()


async def test_one_turn() -> None:
    environment, engine = Script(done(0.5, parsed=1.0)), FakeEngine(version=3, lengths=[6])
    rollout = await run(episode(environment, engine))
    (trace,) = rollout.traces
    assert (rollout.id, rollout.index, rollout.ending, rollout.reward) == ("9/0", 0, "finished", 0.5)
    assert rollout.metrics == {"turns": 1.0, "parsed": 1.0}
    assert trace.token_ids[:6].tolist() == OPENING and trace.token_ids[-1] == END
    assert trace.trained.tolist() == [False] * 6 + [True] * 6
    assert trace.versions.tolist() == [NO_VERSION] * 6 + [3] * 6
    assert environment.heard == ["".join(f"<{t}>" for t in trace.token_ids[6:11])]
    expected = [engine.policy.logprob(int(t), 6 + i, 3) for i, t in enumerate(trace.token_ids[6:])]
    np.testing.assert_allclose(trace.logprobs, [0.0] * 6 + expected, rtol=1e-6)
    assert environment.closed == 1


async def test_several_turns_grow_one_trace_and_nothing_is_rendered_twice() -> None:
    chat = TinyChat()
    environment = Script(says("ab", tools=1.0), says("c"), done(2.0))
    rollout = await run(episode(environment, FakeEngine(version=1, lengths=[6, 4, 8]), chat=chat))
    (trace,) = rollout.traces
    first, second = [USER, ord("a") % 59, ord("b") % 59, END, ASSISTANT], [USER, ord("c") % 59, END, ASSISTANT]
    assert trace.trained.tolist() == [False] * 6 + [True] * 6 + [False] * 5 + [True] * 4 + [False] * 4 + [True] * 8
    assert trace.token_ids[12:17].tolist() == first
    assert trace.token_ids[21:25].tolist() == second
    assert (rollout.reward, rollout.ending, rollout.metrics) == (2.0, "finished", {"turns": 3.0, "tools": 1.0})
    assert chat.opened == 1
    assert chat.decoded == [trace.token_ids[a:b].tolist() for a, b in ((6, 11), (17, 20), (25, 32))]


async def test_friction_59_a_turn_that_ends_with_another_stop_token_is_heard_whole_and_closed() -> None:
    engine = FakeEngine(version=1)
    for seed in range(100):
        drawn = [engine.policy.draw(Sampling(max_tokens=3, seed=seed), 6 + i, 1)[0] for i in range(3)]
        if END not in drawn and drawn[2] not in drawn[:2]:
            break
    chat = TinyChat()
    one = episode(Script(says("a"), done()), engine, chat=chat, seed=seed, stop=(drawn[2],), max_tokens=4)
    rollout = await run(one)
    assert rollout.traces[0].token_ids[6:14].tolist() == [*drawn, END, USER, ord("a") % 59, END, ASSISTANT]
    assert rollout.traces[0].trained[6:14].tolist() == [True] * 3 + [False] * 5
    assert chat.decoded[0] == drawn, "only the end of a turn is not part of what was said"


async def test_a_prompt_of_plain_text_is_encoded_as_it_is() -> None:
    chat = TinyChat()
    rollout = await run(episode(Script(done(), opening=""), chat=chat, prompt=Prompt(id="t", text="2+2=")))
    assert rollout.traces[0].token_ids[:4].tolist() == [ord(c) % 59 for c in "2+2="]
    assert rollout.ending == "finished" and chat.opened == 0


async def test_the_budget_spans_all_turns_and_a_cut_turn_is_judged() -> None:
    environment = Script(says("x"), done(0.25))
    rollout = await run(episode(environment, FakeEngine(version=1, lengths=[6, 50]), max_tokens=10))
    assert rollout.trained_tokens == 10
    assert (rollout.ending, rollout.reward) == ("truncated", 0.25)
    assert len(environment.heard[1].split("><")) == 4  # a turn without an end token is heard whole


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "max_turns"), [([50], 10, 4), ([6, 4], 10, 4), ([6, 6], 200, 2)], ids=str
)
async def test_an_episode_cut_before_its_environment_is_done(
    lengths: list[int], max_tokens: int, max_turns: int
) -> None:
    environment = Script(says("x"), says("y"), says("z"))
    rollout = await run(
        episode(environment, FakeEngine(version=1, lengths=lengths), max_tokens=max_tokens, max_turns=max_turns)
    )
    assert (rollout.ending, rollout.reward) == ("truncated", 0.0)
    assert rollout.traces[0].trained[-1], "an answer that nobody reads is not part of the trace"
    assert environment.closed == 1


@pytest.mark.parametrize(("max_length", "turns"), [(17, 1), (18, 2), (25, 2), (26, 3)])
async def test_friction_48_a_conversation_without_room_is_truncated_in_its_group(max_length: int, turns: int) -> None:
    """An opening of 6 tokens, turns of 6, 4 and 8, and what the environment says: 5 tokens, then 4."""
    environment = Script(says("ab"), says("c"), done(1.0))
    rollout = await run(episode(environment, FakeEngine(version=1, lengths=[6, 4, 8]), max_length=max_length))
    assert rollout.metrics["turns"] == turns == len(environment.heard)
    assert (rollout.ending, rollout.reward) == (("truncated", 0.0) if turns < 3 else ("finished", 1.0))
    assert rollout.traces[0].trained[-1], "an answer that nobody reads is not part of the trace"
    assert environment.closed == 1


async def test_weights_that_interrupt_are_bridged_by_the_prefix() -> None:
    policy = FakePolicy()
    engine = FakeEngine(policy=policy, version=1, lengths=[300], interrupt="abort")
    sampling = Sampling(max_tokens=400, seed=11)
    one = episode(Script(done()), engine, max_tokens=400, seed=11)
    await one.prepare()
    running = asyncio.create_task(one.run())
    for version in (2, 3):
        before = len(one.traces[0])
        await until(functools.partial(_longer, one, before + 20))
        assert (await engine.load(policy.manifest(version))).accepted
    rollout = await asyncio.wait_for(running, 60)
    (trace,) = rollout.traces
    assert (rollout.ending, rollout.trained_tokens, rollout.metrics["turns"]) == ("finished", 300, 1.0)
    assert trace.trained.tolist() == [False] * 6 + [True] * 300
    versions = trace.versions[6:].tolist()
    assert versions == sorted(versions) and set(versions) == {1, 2, 3}
    # What each token would have been under its version, with the episode's seed: no position was drawn twice.
    for position in range(6, 305):
        token, logprob, _ = policy.draw(sampling, position, int(trace.versions[position]))
        if token != END:
            assert (int(trace.token_ids[position]), trace.logprobs[position]) == (token, pytest.approx(logprob))


async def test_an_engine_that_only_aborts_is_given_up() -> None:
    class Aborting(FakeEngine):
        asked = 0

        async def generate(self, request: Request) -> AsyncIterator[Delta]:
            self.asked += 1
            none = np.zeros(0, np.int32)
            yield Delta(
                id=request.id, token_ids=none, logprobs=none.astype(np.float32), versions=none, finish="aborted"
            )

    engine = Aborting(version=1)
    rollout = await run(episode(Script(), engine))
    assert rollout.ending == "failed" and "without a token" in rollout.reason
    assert engine.asked == FRUITLESS_RESUMES + 1


class Odd(Exception):
    def __str__(self) -> str:
        return "\n  first line\nsecond line"


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (Script(Odd()), "environment.step: Odd: first line"),
        (Script(ZeroDivisionError()), "environment.step: ZeroDivisionError"),
        (Script(TimeoutError("theirs")), "environment.step: TimeoutError: theirs"),
        (Script(opening=KeyError("q")), "environment.reset: KeyError: 'q'"),
        (Script(opening=""), "the environment opened without a message and the prompt has no text"),
        (Script(done(float("nan"))), "the reward is nan, not a finite number"),
        (Script(EnvironmentStep(done=True, reward="best")), "environment.step: ValueError: could not convert"),  # type: ignore[arg-type]
        (Script(None), "environment.step: AttributeError"),  # type: ignore[arg-type]
        (Script(EnvironmentStep(messages=[{"role": "tool"}])), "chat.continue_: KeyError: 'content'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_whatever_an_environment_does_fails_its_rollout_only(environment: Script, reason: str) -> None:
    rollout = await run(episode(environment))
    assert rollout.ending == "failed" and rollout.reward is None
    assert rollout.reason.startswith(reason) and "\n" not in rollout.reason
    assert environment.closed == 1


async def test_an_environment_that_is_cancelled_inside_fails() -> None:
    class Cancelling(Script):
        async def step(self, completion: str) -> EnvironmentStep:
            raise asyncio.CancelledError

    rollout = await run(episode(Cancelling()))
    assert rollout.ending == "failed" and "cancelled by the environment itself" in rollout.reason


async def test_an_environment_that_cannot_be_closed_fails() -> None:
    class Sticky(Script):
        async def close(self) -> None:
            await super().close()
            raise OSError("still mounted")

    environment = Sticky(done())
    rollout = await run(episode(environment))
    assert (rollout.ending, rollout.reason) == ("failed", "environment.close: OSError: still mounted")
    assert rollout.reward is None and environment.closed == 1


async def test_engine_failures_keep_the_tokens_so_far() -> None:
    engine = FakeEngine(version=1, lengths=[50], fail_requests={"9/0/0": 7})
    environment = Script(done())
    rollout = await run(episode(environment, engine))
    assert rollout.ending == "failed" and rollout.reason == "fake: request '9/0/0' fails by script"
    assert rollout.trained_tokens == 7 and environment.heard == [] and environment.closed == 1


async def test_an_engine_that_raises_fails_the_rollout() -> None:
    class Broken(FakeEngine):
        async def generate(self, request: Request) -> AsyncIterator[Delta]:
            raise PeerDied("engine0", "killed by signal 9")
            yield

    rollout = await run(episode(Script(done()), Broken(version=1)))
    assert (rollout.ending, rollout.reason) == ("failed", "fake: engine0 died: killed by signal 9")


async def test_cancel_aborts_the_request_and_returns_the_partial() -> None:
    engine, environment = FakeEngine(version=1, lengths=[10_000]), Script(done())
    one = episode(environment, engine, max_tokens=20_000)
    await one.prepare()
    running = asyncio.create_task(one.run())
    await until(lambda: len(one.traces[0]) >= 20)
    await one.cancel("doomed")
    rollout = await asyncio.wait_for(running, 60)
    assert (rollout.ending, rollout.reason, rollout.reward) == ("aborted", "doomed", None)
    assert 14 <= rollout.trained_tokens < 20_000
    assert engine.counters().generated_tokens == rollout.trained_tokens
    assert environment.heard == [] and environment.closed == 1


async def test_cancel_does_not_wait_for_a_token() -> None:
    engine = FakeEngine(version=1)
    engine.gate.clear()
    one = episode(Script(done()), engine)
    await one.prepare()
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    await one.cancel("shutdown")
    assert (await asyncio.wait_for(running, 60)).ending == "aborted"


async def test_a_malformed_delta_fails_the_rollout_and_closes_the_stream() -> None:
    closed = []

    class Deltas:
        def __aiter__(self) -> Deltas:
            return self

        async def __anext__(self) -> Delta:
            return Delta(
                id="9/0/0",
                token_ids=np.ones(3, np.int32),
                logprobs=np.zeros(2, np.float32),
                versions=np.ones(3, np.int32),
            )

        async def aclose(self) -> None:
            closed.append(True)

    class Garbled(FakeEngine):
        def generate(self, request: Request) -> AsyncIterator[Delta]:
            return Deltas()

    rollout = await run(episode(Script(done()), Garbled(version=1)))
    assert rollout.ending == "failed" and "3 tokens came with 2 log-probabilities and 3 versions" in rollout.reason
    assert closed == [True] and rollout.trained_tokens == 0


async def test_cancel_reaches_a_waiting_environment() -> None:
    environment = Script(60.0)
    one = episode(environment)
    await one.prepare()
    running = asyncio.create_task(one.run())
    await until(lambda: bool(environment.heard))
    await one.cancel("shutdown")
    rollout = await asyncio.wait_for(running, 60)
    assert (rollout.ending, rollout.reason, rollout.trained_tokens) == ("aborted", "shutdown", 6)
    assert environment.closed == 1


async def test_cancel_before_the_run_asks_nothing_of_the_engine() -> None:
    engine = FakeEngine(version=1)
    one = episode(Script(done()), engine)
    await one.prepare()
    await one.cancel("shutdown")
    assert (await one.run()).ending == "aborted"
    assert engine.counters().generated_tokens == 0


async def test_run_submits_before_it_yields() -> None:
    engine = FakeEngine(version=1, lengths=[4])
    engine.gate.clear()
    one = episode(Script(done()), engine)
    await one.prepare()
    running = asyncio.create_task(one.run())
    await asyncio.sleep(0)
    assert engine.counters().waiting == 1
    engine.gate.set()
    assert (await asyncio.wait_for(running, 60)).ending == "finished"


async def test_an_episode_that_is_not_run_can_be_discarded() -> None:
    environment = Script()
    one = episode(environment)
    await one.prepare()
    await one.discard()
    await one.discard()
    assert environment.closed == 1


async def test_running_unprepared_is_a_failure_with_a_reason() -> None:
    rollout = await episode(Script(done())).run()
    assert rollout.ending == "failed" and "prepared" in rollout.reason

"""An episode that goes on from an earlier attempt's tokens: records stay, budget and judge see the whole."""

from __future__ import annotations

import msgspec
import numpy as np
from rollout_parts import Script, TinyChat, done

from headrace.engines.base import Sampling
from headrace.engines.fake import FakeEngine
from headrace.rollouts.base import EpisodePlan
from headrace.rollouts.turns import Episode
from headrace.types import Prompt, Trace

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "hi"}])


def episode(engine: FakeEngine, environment: Script, chat: TinyChat, max_tokens: int, prefix: Trace | None) -> Episode:
    plan = EpisodePlan(
        id="9/0", index=0, prompt=PROMPT, sampling=Sampling(max_tokens=max_tokens, seed=5), prefix=prefix
    )
    return Episode(plan, environment, engine, chat)


async def run(one: Episode) -> tuple[str, Trace]:
    await one.prepare()
    rollout = await one.run()
    return rollout.reason or rollout.ending, rollout.traces[0]


async def cut_off(tokens: int) -> Trace:
    """The first tokens of an attempt under version 1, as untrained context."""
    engine = FakeEngine(version=1)
    ending, trace = await run(episode(engine, Script(done()), TinyChat(), tokens, None))
    await engine.close()
    assert ending == "truncated"
    return msgspec.structs.replace(trace, trained=np.zeros(len(trace), np.bool_))


async def test_the_first_turn_goes_on_and_is_judged_as_a_whole() -> None:
    prefix = await cut_off(4)
    engine, script, chat = FakeEngine(version=2, lengths=[3]), Script(done(0.5)), TinyChat()
    ending, trace = await run(episode(engine, script, chat, 10, prefix))
    await engine.close()
    assert ending == "finished" and len(trace) == len(prefix) + 3
    np.testing.assert_array_equal(trace.token_ids[: len(prefix)], prefix.token_ids)
    np.testing.assert_array_equal(trace.logprobs[: len(prefix)], prefix.logprobs)
    np.testing.assert_array_equal(trace.versions, [*prefix.versions, 2, 2, 2])
    assert trace.trained.tolist() == [False] * len(prefix) + [True] * 3
    answer = trace.token_ids[-7:-1]
    assert script.heard == ["".join(f"<{token}>" for token in answer)], "the judge hears the whole turn"
    # The noise of a token is that of its position: the same tokens as in one piece, as far as weights are the same.
    assert prefix.versions[-1] == 1 and (prefix.versions[:-4] == -1).all()


async def test_tokens_of_the_earlier_attempt_count_for_the_budget() -> None:
    prefix = await cut_off(4)
    engine = FakeEngine(version=2, lengths=[50])
    ending, trace = await run(episode(engine, Script(done()), TinyChat(), 10, prefix))
    await engine.close()
    assert ending == "truncated" and trace.trained.sum() == 6


async def test_an_environment_that_opens_otherwise_fails_the_rollout() -> None:
    prefix = await cut_off(4)
    engine = FakeEngine(version=2)
    reason, _ = await run(episode(engine, Script(done(), opening="no"), TinyChat(), 10, prefix))
    await engine.close()
    assert "opens with other tokens" in reason


async def test_a_prefix_is_part_of_what_a_later_life_goes_on_from() -> None:
    prefix = await cut_off(4)
    engine = FakeEngine(version=2)
    _, whole = await run(episode(engine, Script(done()), TinyChat(), 10, prefix))
    for cut in range(len(prefix) - 4, len(whole) + 1):
        sampling = Sampling(max_tokens=10, seed=5)
        plan = EpisodePlan(id="9/0", index=0, prompt=PROMPT, sampling=sampling, saved=[whole.part(0, cut)])
        resumed = Episode(plan, Script(done()), engine, TinyChat())
        ending, trace = await run(resumed)
        if cut >= len(prefix):
            for name in ("token_ids", "trained", "logprobs", "versions"):
                np.testing.assert_array_equal(getattr(trace, name), getattr(whole, name), err_msg=f"{name}, {cut}")
        np.testing.assert_array_equal(trace.token_ids[:cut], whole.token_ids[:cut])
        np.testing.assert_array_equal(trace.trained[:cut], whole.trained[:cut])
        assert resumed.discarded == 0 and ending in ("finished", "truncated")
        assert int((trace.versions != -1).sum()) <= 10, "salvaged tokens count in the budget"
    await engine.close()

"""The endpoints, with the `openai` package as the client and a fake engine behind them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
from gateway_parts import END, TEMPLATE, client, fake_engine, merging_chat, opened, post, serving, until, user

from headrace.engines.base import Sampling
from headrace.engines.fake_policy import FakePolicy
from headrace.errors import UserError
from headrace.rollouts.base import derive_seed

CHAT = merging_chat()
HI = [user("hi")]


async def test_the_model_is_listed() -> None:
    async with serving() as gateway, client(gateway) as api:
        assert [model.id for model in (await api.models.list()).data] == ["tiny"]
        assert (await api.models.retrieve("tiny")).owned_by == "headrace"
        with pytest.raises(openai.NotFoundError, match="there is one model here: 'tiny'"):
            await api.models.retrieve("other")


async def test_an_answer_is_what_the_engine_sampled() -> None:
    async with serving() as gateway:
        session = opened(gateway)
        async with client(gateway, session) as api:
            answer = await api.chat.completions.create(model="tiny", messages=HI, logprobs=True)
    (turn,) = session.conversation.turns
    prompt = CHAT.open(HI)
    policy, position = FakePolicy(64), len(prompt)
    seed = derive_seed(session.sampling.seed, "request 0", 0)
    sampling = msgspec.structs.replace(session.sampling, seed=seed)
    assert len(turn.sampled) == 5 and turn.sampled[-1] == END
    for offset, token in enumerate(turn.sampled[:-1]):
        drawn, logprob, _ = policy.draw(sampling, position + offset, 3)
        if drawn == END:
            continue  # the script of the engine puts another one there
        assert (drawn, pytest.approx(logprob)) == (token, float(turn.logprobs[offset]))
    assert turn.versions.tolist() == [3] * 5
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == (CHAT.decode(turn.sampled[:-1]), "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 5)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    np.testing.assert_allclose([entry.logprob for entry in choice.logprobs.content], turn.logprobs, rtol=1e-6)


async def test_turns_go_on_from_their_tokens_and_an_edit_forks() -> None:
    async with serving() as gateway:
        session = opened(gateway)
        async with client(gateway, session) as api:
            history: list[Any] = list(HI)
            for _ in range(3):
                answer = await api.chat.completions.create(model="tiny", messages=history)
                history += [answer.choices[0].message, user("more")]
            await api.chat.completions.create(model="tiny", messages=[*history[:2], user("other")])
    first, second, third, fork = session.conversation.turns
    assert second.token_ids[: len(first.token_ids)].tolist() == first.token_ids.tolist()
    assert third.token_ids[: len(second.token_ids)].tolist() == second.token_ids.tolist()
    assert fork.opening.parent is first
    # The same position, but another request: its noise is its own.
    assert fork.sampled.tolist() != second.sampled.tolist()
    main, edited = session.conversation.traces()
    assert main.token_ids.tolist() == third.token_ids.tolist()
    assert main.trained_tokens + edited.trained_tokens == session.conversation.sampled


async def test_friction_56_a_follow_up_under_a_template_that_removes_thinking_is_one_line() -> None:
    forgetful = TEMPLATE.replace("message.content", "message.content.split('</think>')[-1]")
    async with serving(template=forgetful) as gateway:
        session = opened(gateway)
        async with client(gateway, session) as api:
            answer = await api.chat.completions.create(model="tiny", messages=HI)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            with pytest.raises(openai.BadRequestError, match="chat template removes the thinking") as refusal:
                await api.chat.completions.create(model="tiny", messages=[*HI, said, user("ab")])
    assert "\n" not in refusal.value.message and len(session.conversation.turns) == 1


async def test_a_streamed_answer_is_the_same_answer() -> None:
    async def answered(stream: bool) -> tuple[str, Any, list[int], Any]:
        async with serving(fake_engine(lengths=[9])) as gateway:
            session = opened(gateway)
            async with client(gateway, session) as api:
                if not stream:
                    whole = await api.chat.completions.create(model="tiny", messages=HI, logprobs=True)
                    choice = whole.choices[0]
                    values = [entry.logprob for entry in choice.logprobs.content]
                    return choice.message.content, choice.finish_reason, values, whole.usage.total_tokens
                text, finish, values, total = "", None, [], None
                chunks = await api.chat.completions.create(
                    model="tiny", messages=HI, logprobs=True, stream=True, stream_options={"include_usage": True}
                )
                seen = 0
                async for chunk in chunks:
                    seen += 1
                    if chunk.usage is not None:
                        total = chunk.usage.total_tokens
                        continue
                    text += chunk.choices[0].delta.content or ""
                    finish = chunk.choices[0].finish_reason or finish
                    if chunk.choices[0].logprobs is not None:
                        values += [entry.logprob for entry in chunk.choices[0].logprobs.content]
                assert seen > 4
                return text, finish, values, total

    whole, streamed = await answered(False), await answered(True)
    assert whole == streamed
    assert len(whole[0]) >= 8


async def test_several_choices_are_different_and_all_recorded() -> None:
    async with serving() as gateway:
        session = opened(gateway)
        async with client(gateway, session) as api:
            answer = await api.chat.completions.create(model="tiny", messages=HI, n=3, max_completion_tokens=4)
            streams: dict[int, str] = {}
            async for chunk in await api.chat.completions.create(model="tiny", messages=HI, n=2, stream=True):
                for choice in chunk.choices:
                    streams[choice.index] = streams.get(choice.index, "") + (choice.delta.content or "")
    texts = [choice.message.content for choice in answer.choices]
    turns = session.conversation.turns
    assert len(set(texts)) == 3
    assert texts == [CHAT.decode([t for t in turn.sampled if t != END]) for turn in turns[:3]]
    assert list(streams.values()) == [CHAT.decode([t for t in turn.sampled if t != END]) for turn in turns[3:]]
    assert all(len(turn.sampled) <= 4 for turn in turns[:3])
    assert len(session.conversation.traces()) == 5


async def test_plain_completions_and_stop_strings() -> None:
    async with serving(fake_engine(lengths=[30])) as gateway:
        session = opened(gateway)
        async with client(gateway, session) as api:
            whole = await api.completions.create(model="tiny", prompt="abc", max_tokens=12, logprobs=0)
            text = whole.choices[0].text
            stop = text[5:7]
        again = opened(gateway)
        async with client(gateway, again) as api:
            cut = await api.completions.create(model="tiny", prompt="abc", max_tokens=12, stop=[stop])
            more = await api.completions.create(model="tiny", prompt="abc" + cut.choices[0].text + "de", max_tokens=2)
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.token_logprobs or []) == 12
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    first, second = again.conversation.turns
    assert stop in CHAT.decode(first.sampled), "the tokens of the stop string were sampled, and stay"
    assert stop not in CHAT.decode(first.sampled[:-1])
    assert second.opening.parent is first
    assert more.choices[0].text == CHAT.decode(second.sampled) and len(second.sampled) == 2


async def test_friction_59_an_agent_reads_the_runs_own_stop_token() -> None:
    """The token may be the end of a call: without it, the agent could not read the call."""
    async with serving(fake_engine(lengths=None)) as gateway:
        session = opened(gateway)
        free = fake_engine().policy
        seed = derive_seed(session.sampling.seed, "request 0", 0)
        start = len(CHAT.open(HI))
        drawn = [free.draw(Sampling(max_tokens=3, seed=seed), start + at, 3)[0] for at in range(3)]
        assert END not in drawn
        session.sampling = msgspec.structs.replace(session.sampling, stop_token_ids=(END, drawn[2]))
        async with client(gateway, session) as api:
            answer = await api.chat.completions.create(model="tiny", messages=HI)
    (turn,) = session.conversation.turns
    assert turn.sampled[-1] == drawn[2] and not turn.ended
    assert answer.choices[0].message.content == CHAT.decode(turn.sampled)


async def test_without_a_session_the_client_chooses_and_nothing_is_recorded() -> None:
    engine = fake_engine(lengths=None)
    async with serving(engine) as gateway, client(gateway) as api:
        ask = {"model": "gpt-x", "messages": HI, "max_tokens": 10}
        one, two = [(await api.chat.completions.create(**ask, seed=7)).choices[0].message for _ in range(2)]
        greedy = [(await api.chat.completions.create(**ask, temperature=0)).choices[0].message for _ in range(2)]
        other = (await api.chat.completions.create(**ask, seed=8)).choices[0].message
        assert len(gateway.sessions) == 0
    assert one.content == two.content != other.content
    assert greedy[0].content == greedy[1].content
    policy, start = FakePolicy(64), len(CHAT.open(HI))
    best = [policy.draw(Sampling(max_tokens=1, temperature=0), start + i, 3).token for i in range(10)]
    ids = best[: best.index(END)] if END in best else best
    assert greedy[0].content == CHAT.decode(ids)


async def test_a_session_is_sampled_as_its_run_says_and_that_is_said_once() -> None:
    notes: list[str] = []
    async with serving(fake_engine(lengths=[5]), note=notes.append) as gateway:
        plain, wishful = opened(gateway, seed=9), opened(gateway, seed=9)
        async with client(gateway, plain) as api:
            await api.chat.completions.create(model="tiny", messages=HI)
        async with client(gateway, wishful) as api:
            for _ in range(2):
                await api.chat.completions.create(model="tiny", messages=HI, temperature=0.3, seed=1)
    assert wishful.conversation.turns[0].logprobs.tolist() == plain.conversation.turns[0].logprobs.tolist()
    assert [line for line in notes if line.startswith("an agent")] == [
        "an agent asks for temperature 0.3; sessions are sampled as the run says, at 1",
        "an agent gives a seed; the noise of a session follows from [run] seed",
    ]


async def test_sessions_side_by_side_do_not_mix() -> None:
    async def work(api: openai.AsyncOpenAI, word: str) -> list[str]:
        history: list[Any] = [user(word)]
        for _ in range(4):
            answer = await api.chat.completions.create(model="tiny", messages=history)
            history += [answer.choices[0].message, user(word)]
        return [str(message.content) for message in history[1::2]]

    engine = fake_engine(lengths=[5], token_seconds=0.001)
    async with serving(engine) as gateway:
        words = [f"{letter}{letter}x" for letter in "ghijkl"]
        sessions = [opened(gateway, seed=n) for n in range(len(words))]
        apis = [client(gateway, session) for session in sessions]
        together = await asyncio.gather(*(work(api, word) for api, word in zip(apis, words, strict=True)))
        alone = []
        for n, word in enumerate(words):
            async with client(gateway, opened(gateway, seed=n)) as api:
                alone.append(await work(api, word))
        for api in apis:
            await api.close()
    assert together == alone
    for session, word, texts in zip(sessions, words, together, strict=True):
        (trace,) = session.conversation.traces()
        assert [CHAT.decode(turn.sampled[:-1]) for turn in session.conversation.turns] == texts
        assert CHAT.decode(trace.token_ids[~trace.trained]) == word * 4


async def test_the_budget_is_that_of_the_run() -> None:
    async with serving(fake_engine(lengths=[100])) as gateway:
        session = opened(gateway, max_tokens=6)
        async with client(gateway, session) as api:
            answer = await api.chat.completions.create(model="tiny", messages=HI, max_tokens=50)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None and answer.usage.completion_tokens == 6
            with pytest.raises(
                openai.BadRequestError, match=r"used its 6 tokens \(\[rollouts\] max_tokens\)"
            ) as caught:
                await api.chat.completions.create(model="tiny", messages=HI)
            assert caught.value.code == "context_length_exceeded"
        assert session.exhausted
        many = opened(gateway, max_tokens=100)
        many.max_turns = 1
        async with client(gateway, many) as api:
            await api.chat.completions.create(model="tiny", messages=HI, max_tokens=2)
            with pytest.raises(openai.BadRequestError, match="used its 1 turns"):
                await api.chat.completions.create(model="tiny", messages=HI)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the request's body: input data was truncated"),
        ({"model": "m"}, "object missing required field `messages`"),
        ({"model": "m", "messages": []}, "messages: there is none"),
        ({"model": "m", "messages": [{"content": "x"}]}, "messages[0]: role must be text"),
        ({"model": "m", "messages": [{"role": "user"}]}, "messages[0]: content must be text"),
        ({"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text can be read"),
        ({"model": "m", "messages": HI, "temperature": -1}, "expected `float` >= 0.0 - at `$.temperature`"),
        ({"model": "m", "messages": HI, "max_tokens": 0}, "expected `int` >= 1 - at `$.max_tokens`"),
        ({"model": "m", "messages": HI, "best": 1}, "object contains unknown field `best`"),
        ({"model": "m", "messages": HI, "top_logprobs": 2}, "top_logprobs: the log-probability of the sampled token"),
        ({"model": "m", "messages": HI, "presence_penalty": 1}, "presence_penalty: the engines sample without"),
        ({"model": "m", "messages": HI, "logit_bias": {"5": 1}}, "logit_bias: the engines sample without biases"),
        ({"model": "m", "messages": HI, "response_format": {"type": "json_object"}}, "response_format: answers are"),
        ({"model": "m", "messages": HI, "tool_choice": "required"}, "tool_choice: the policy chooses"),
        ({"model": "m", "messages": [user("a" * 400)]}, "leave no room under the longest length of 200"),
    ],
)
async def test_bad_input_is_one_line(body: Any, message: str) -> None:
    async with serving() as gateway:
        status, answer = await post(gateway, "/chat/completions", body)
    assert status == 400
    assert message in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


async def test_bad_completions_paths_and_keys() -> None:
    async with serving() as gateway:
        for body in ({"prompt": ["a", "b"]}, {"prompt": ""}, {"prompt": [1, -1]}):
            status, answer = await post(gateway, "/completions", {"model": "m", **body})
            assert (status, answer["error"]["param"]) == (400, "prompt")
        assert (await post(gateway, "/completions", {"model": "m", "prompt": "a", "echo": True}))[0] == 400
        assert (await post(gateway, "/embeddings", {}))[0] == 404
        for key in ("", "wrong", f"{gateway.key}x"):
            status, answer = await post(gateway, "/chat/completions", {"model": "m", "messages": HI}, key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        async with client(gateway, default_headers={"x-headrace-session": "nobody"}) as api:
            with pytest.raises(openai.NotFoundError, match="there is no open session 'nobody'"):
                await api.completions.create(model="m", prompt="a")


async def test_the_header_names_a_session_too() -> None:
    async with serving() as gateway:
        session = opened(gateway)
        async with client(gateway, default_headers={"x-headrace-session": session.id}) as api:
            await api.chat.completions.create(model="tiny", messages=HI)
        assert len(session.conversation.turns) == 1
        headers = {"x-headrace-session": opened(gateway).id}
        async with client(gateway, session, default_headers=headers) as api:
            with pytest.raises(openai.BadRequestError, match="name two sessions"):
                await api.chat.completions.create(model="tiny", messages=HI)


async def test_a_reward_is_taken_once_and_ends_the_session() -> None:
    async with serving() as gateway:
        session, other = opened(gateway), opened(gateway)
        path = f"/sessions/{session.id}/reward"
        assert (await post(gateway, path, b'{"reward": 1e999}'))[0] == 400
        assert (await post(gateway, path, {"reward": "much"}))[0] == 400
        assert (await post(gateway, path, {"reward": 1}, other.key))[0] == 403
        assert (await post(gateway, path, {"reward": 0.5, "metrics": {"steps": 3}}))[0] == 200
        assert (await post(gateway, path, {"reward": 0.7}))[0] == 409
        assert session.reward is not None and session.reward.reward == 0.5
        async with client(gateway, session) as api:
            with pytest.raises(openai.APIStatusError, match="has ended") as caught:
                await api.chat.completions.create(model="tiny", messages=HI)
            assert caught.value.status_code == 410
        assert other.reward is None


async def test_a_client_that_leaves_frees_the_engine_and_its_partial_stream_is_kept() -> None:
    engine = fake_engine(lengths=[1000], token_seconds=0.002)
    async with serving(engine) as gateway:
        session = opened(gateway, max_tokens=1000)
        async with client(gateway, session) as api:
            with pytest.raises(openai.APITimeoutError):
                await api.with_options(timeout=0.2).chat.completions.create(model="tiny", messages=HI)
            chunks = await api.chat.completions.create(model="tiny", messages=HI, stream=True)
            text = ""
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
                if len(text) > 5:
                    break
            await chunks.close()
        await until(lambda: bool(session.conversation.turns))
        assert engine.counters().running == 0
    (turn,) = session.conversation.turns
    assert CHAT.decode(turn.sampled).startswith(text)


async def test_an_engine_that_fails_is_an_error_with_its_reason() -> None:
    async with serving(fake_engine(lengths=[100], die_after=3)) as gateway:
        session = opened(gateway)
        async with client(gateway, session) as api:
            with pytest.raises(openai.InternalServerError, match="fake died") as caught:
                await api.chat.completions.create(model="tiny", messages=HI)
            assert caught.value.status_code == 503
        assert "fake died" in session.failure
        assert session.conversation.turns == []


async def test_an_aborted_request_is_resumed_by_its_prefix() -> None:
    engine = fake_engine(lengths=[60], token_seconds=0.002)
    async with serving(engine) as gateway:
        session = opened(gateway, max_tokens=100)
        async with client(gateway, session) as api:
            answer = asyncio.create_task(api.chat.completions.create(model="tiny", messages=HI))
            for _ in range(3):
                await asyncio.sleep(0.03)
                await engine.abort()
            assert (await answer).choices[0].finish_reason == "stop"
    assert len(session.conversation.turns[0].sampled) == 60


async def test_a_port_in_use_is_one_line() -> None:
    async with serving() as gateway, serving() as other:
        port = int(gateway.base_url.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(UserError, match=rf"\[gateway\] port: cannot listen on 127.0.0.1:{port}"):
            await other.listen(port, "k" * 20)

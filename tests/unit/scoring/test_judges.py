"""Judges: what they ask, how replies become a number, and what happens to replies that are none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace.config import dump_config, load_config, make_config
from headrace.config.scorers import JudgeConfig
from headrace.errors import ConfigError, ModelError
from headrace.pipeline.inputs import check_inputs, make_stage, read_api_key
from headrace.scoring.base import Ended, ScoreError, Turn
from headrace.scoring.functions import Question
from headrace.scoring.judges import Judge, Template, json_objects, prompt_text, read_number
from headrace.scoring.replies import UrlReplies
from headrace.types import Prompt, Rollout, Trace

ASKED = "Question: {prompt}\nAnswer: {completion}\nRight: {answer}"


def judge_config(**keys: Any) -> JudgeConfig:
    return JudgeConfig(**{"template": ASKED, "url": "http://x", "served_model": "m", **keys})


def ended(completion: str, **data: Any) -> Ended:
    prompt = Prompt(id="p", messages=[{"role": "user", "content": "1 + 1?"}], data={"answer": "2", **data})
    trace = Trace.of_context(np.asarray([1, 2], np.int32))
    rollout = Rollout(id="1/0", index=0, traces=[trace], ending="finished")
    return Ended(prompt, rollout, [Turn(0, 1, 2, lambda: completion)])


@pytest.mark.parametrize(
    ("reply", "keys", "value"),
    [
        ("I give it 3 of 10, no: 7.5", {}, 7.5),
        ("-2", {}, -2.0),
        ("On a scale of 1-5", {}, 5.0),
        ("Score: .5", {}, 0.5),
        ("I would say...5.", {}, 5.0),
        ("2.5e-1", {}, 0.25),
        ("step-2", {}, 2.0),
        ("no number at all", {}, None),
        ("", {}, None),
        ("Score: 4/10", {"pattern": r"score: (\d+)"}, 4.0),
        ("Score: 4, better Score: 5", {"pattern": r"score: (\d+)"}, 5.0),
        ("8/10", {"pattern": r"score: (\d+)"}, None),
        ("good", {"pattern": r"good|bad", "words": {"good": 1, "bad": 0}}, 1.0),
        ("Is it right? Yes. At first: no", {"words": {"yes": 1, "no": 0}}, 0.0),
        ("nothing", {"words": {"yes": 1, "no": 0}}, None),
        ('{"score": 3}', {"field": "score"}, 3.0),
        ('Here: {"why": {"score": 9}, "score": "0.5"}.', {"field": "score"}, 0.5),
        ('{"score": "good"}', {"field": "score", "words": {"Good": 1}}, 1.0),
        ('{"score": null}', {"field": "score"}, None),
        ('{"score": true}', {"field": "score"}, None),
        ('{"score": [1]}', {"field": "score"}, None),
        ('{"score": NaN}', {"field": "score"}, None),
        ('{"score": 1e999}', {"field": "score"}, None),
        ('{"points": 3}', {"field": "score"}, None),
        ('{"score": 3', {"field": "score"}, None),
        ("{" * 5000, {"field": "score"}, None),
    ],
)
def test_the_number_of_a_reply(reply: str, keys: dict[str, Any], value: float | None) -> None:
    assert read_number(reply, judge_config(**keys)) == value


def test_objects_in_a_text_come_last_first() -> None:
    assert json_objects('a {"b": {"c": 1}} d {"e": 2} {') == [{"e": 2}, {"b": {"c": 1}}]


def test_a_template_is_filled_with_the_fields_of_the_prompt() -> None:
    filled = Template("{{{prompt}}} {completion}").fill({"prompt": "{completion}", "completion": "42"})
    assert filled == "{{completion}} 42"
    with pytest.raises(ScoreError, match="wants 'answer', which this prompt does not have"):
        Template(ASKED).fill({"prompt": "p", "completion": "c"})


@pytest.mark.parametrize(
    "text",
    [
        "{completion",
        "{completion}}",
        "{completion} {a.b}",
        "{completion} {}",
        "{prompt}",
        "{completion} Reply with {score: 1}",
        '{completion} Reply with {"score": 1}',
        "{completion!r}",
    ],
)
def test_a_text_that_is_no_template_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Template(text)


def test_a_prompt_of_several_messages_is_one_text() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert prompt_text(Question(completion="", messages=messages)) == "Hi"
    more = [*messages, {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "1 + 1?"}]
    assert prompt_text(Question(completion="", messages=more)).startswith("system: Be brief.\n\nuser: Hi\n\nassistant:")


Handler = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def judge(answer: Handler, template: str = ASKED, **keys: Any) -> AsyncIterator[tuple[Judge, list[dict]]]:
    """A judge behind a server that answers every body so: with a list of replies, or with a status and a text."""
    seen: list[dict] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append({**body, "key": request.headers.get("Authorization")})
        found = answer(body)
        if isinstance(found, tuple):
            return web.Response(status=found[0], text=found[1])
        return web.json_response({"choices": [{"message": {"content": reply}} for reply in found]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    async with TestServer(app) as server:
        config = judge_config(template=template, patience=0.0, **keys)
        source = UrlReplies(
            str(server.make_url("/v1")), "m", key="k", max_tokens=config.max_tokens,
            temperature=config.temperature, concurrency=4,
        )  # fmt: skip
        made = Judge(config, template, source)
        await made.start()
        try:
            yield made, seen
        finally:
            await made.close()


async def test_a_judge_asks_and_scores() -> None:
    async with judge(lambda body: ["7"], system="You are strict.", max_tokens=9) as (made, seen):
        [score] = await made.score(ended("two"))
    assert score.value == 7.0
    assert seen == [
        {
            "model": "m", "max_tokens": 9, "temperature": 0.0, "seed": 0, "key": "Bearer k",
            "messages": [
                {"role": "system", "content": "You are strict."},
                {"role": "user", "content": "Question: 1 + 1?\nAnswer: two\nRight: 2"},
            ],
        }
    ]  # fmt: skip


async def test_several_replies_become_one_number() -> None:
    replies = ["1", "5", "oh", "1"]
    async with judge(lambda body: replies[: body["n"]], samples=4, temperature=1.0) as (made, _):
        [score] = await made.score(ended("two"))
    assert (score.value, score.metrics) == (7 / 3, {"spread": 4.0})
    async with judge(lambda body: replies, samples=4, temperature=1.0, combine="majority") as (made, _):
        [score] = await made.score(ended("two"))
    assert score.value == 1.0


async def test_a_server_that_gives_one_reply_at_a_time_is_asked_for_each() -> None:
    async with judge(lambda body: [str(body["seed"])], samples=4, temperature=1.0) as (made, seen):
        [score] = await made.score(ended("two"))
    assert (score.value, score.metrics) == (1.5, {"spread": 3.0})
    assert [body.get("n") for body in seen] == [4, None, None, None]
    answers = iter([["1"], (500, "no memory")])
    async with judge(lambda body: next(answers), samples=2, temperature=1.0, retries=0) as (made, _):
        with pytest.raises(ScoreError, match="answered 500: no memory"):
            await made.score(ended("two"))


async def test_replies_without_a_number_fail_the_rollout_after_the_retries() -> None:
    async with judge(lambda body: ["good"], retries=3) as (made, seen):
        with pytest.raises(ScoreError, match=r"^the judge gave no number: 'good'$"):
            await made.score(ended("two"))
    assert len(seen) == 1, "at temperature 0 the same reply would come again"
    replies = iter([["good"], ["fine"], ["3"]])
    async with judge(lambda body: next(replies), retries=3, temperature=1.0) as (made, seen):
        [score] = await made.score(ended("two"))
    assert score.value == 3.0
    assert len({body["seed"] for body in seen}) == 3


async def test_the_same_question_is_asked_once_as_far_as_answers_are_remembered() -> None:
    async with judge(lambda body: ["7"], cache=2) as (made, seen):
        for completion in ("a", "b", "a", "c", "a", "b"):
            await made.score(ended(completion))
    asked = [body["messages"][0]["content"].splitlines()[1] for body in seen]
    assert asked == ["Answer: a", "Answer: b", "Answer: c", "Answer: b"]


async def test_a_question_that_is_under_way_is_not_asked_again() -> None:
    async with judge(lambda body: ["7"]) as (made, seen):
        first, *others = [asyncio.create_task(made.score(ended("a"))) for _ in range(4)]
        await asyncio.sleep(0)
        first.cancel()  # Others wait for its answer.
        assert [[score.value for score in each] for each in await asyncio.gather(*others)] == [[7.0]] * 3
        alone = asyncio.create_task(made.score(ended("b")))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        assert [score.value for score in await made.score(ended("b"))] == [7.0]
    assert [body["messages"][0]["content"].splitlines()[1] for body in seen].count("Answer: a") == 1
    async with judge(lambda body: (400, "no")) as (made, seen):
        failed = await asyncio.gather(*(made.score(ended("a")) for _ in range(3)), return_exceptions=True)
    assert len({str(error) for error in failed}) == len(seen) == 1
    async with judge(lambda body: ["7"], cache=0) as (made, seen):
        await asyncio.gather(*(made.score(ended("a")) for _ in range(3)))
    assert len(seen) == 3


async def test_a_key_that_a_server_quotes_is_not_shown() -> None:
    async with judge(lambda body: (401, "Incorrect key: Bearer k")) as (made, _):
        with pytest.raises(ScoreError, match=r"answered 401: Incorrect \*\*\*ey: Bearer \*\*\*$"):
            await made.score(ended("two"))


@pytest.mark.parametrize(
    ("answer", "line", "attempts"),
    [
        ((500, "out of memory"), "answered 500: out of memory", 3),
        ((503, "busy"), "answered 503: busy", 3),
        ((401, "who are you?"), "answered 401: who are you?", 1),
        ((200, "<html>"), "did not answer as OpenAI's API does", 3),
        ((200, '{"choices": [{"text": "7"}]}'), "did not answer as OpenAI's API does", 3),
        ([], "answered without a reply", 3),
    ],
)
async def test_a_server_that_answers_wrongly_is_a_reason(answer: Any, line: str, attempts: int) -> None:
    async with judge(lambda body: answer, retries=2) as (made, seen):
        with pytest.raises(ScoreError, match=line):
            await made.score(ended("two"))
    assert len(seen) == attempts


async def test_a_server_that_is_not_there_is_a_reason() -> None:
    source = UrlReplies("http://127.0.0.1:1/v1", "m", key="", max_tokens=1, temperature=0.0, concurrency=1)
    gone = Judge(judge_config(patience=0.0, retries=0), ASKED, source)
    await gone.start()
    with pytest.raises(ScoreError, match="cannot be reached"):
        await gone.score(ended("two"))
    await gone.close()


def test_the_version_changes_with_what_a_judge_says_and_not_with_its_limits() -> None:
    def version(template: str = ASKED, weights: str = "", **keys: Any) -> str:
        source = UrlReplies("http://x", "m", key="", max_tokens=1, temperature=0.0, concurrency=1)
        return Judge(judge_config(**keys), template, source, weights=weights).version

    assert version() == version(weight=3.0, timeout=1.0, concurrency=2, cache=0)
    changed = [version("{completion}"), version(weights="other"), version(served_model="n"), version(max_tokens=3)]
    assert len({version(), *changed}) == 5


MODEL = {"path": str(Path(__file__).parents[3] / "examples/quickstart/model"), "weights": "random"}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"template": "Is it good? {{}}"}, "[scorers.j] template: the template has no {completion}"),
        ({"template": "{completion} {"}, "[scorers.j] template: it is not a template: "),
        ({"template": "none.txt"}, "[scorers.j] template: "),
        ({"api_key": "NO_SUCH_KEY"}, "[scorers.j] api_key: the environment variable 'NO_SUCH_KEY' is not set"),
        ({"url": "", "model": "tests"}, "[scorers.j] model: "),
        ({"url": ""}, "[scorers.j] model: give the model of the judge, or the url of a server"),
        ({"model": "m"}, "[scorers.j] model: give the model of the judge, or the url of a server"),
        ({"url": "ftp://x"}, "[scorers.j] url: 'ftp://x' is not a URL"),
        ({"url": "http://[x"}, "[scorers.j] url: 'http://[x' is not a URL"),
        ({"url": "http://x:port/v1"}, "[scorers.j] url: 'http://x:port/v1' is not a URL"),
        ({"url": "http:///v1"}, "[scorers.j] url: 'http:///v1' is not a URL"),
        ({"url": "http://me:secret@x/v1"}, "[scorers.j] url: it holds more than an address; a key goes into"),
        ({"url": "http://x/v1?key=secret"}, "[scorers.j] url: it holds more than an address; a key goes into"),
        ({"served_model": ""}, "[scorers.j] served_model is required with url"),
        ({"pattern": "("}, "[scorers.j] pattern: '(' is not a regular expression"),
        ({"pattern": "a", "field": "b"}, "[scorers.j] field: pattern is given too"),
        ({"samples": 3}, "[scorers.j] samples: 3 replies are all the same at temperature 0"),
        ({"kind": "jury"}, "[scorers.j] kind: invalid value 'jury' (one of: function, program, judge"),
        ({"combine": "sum"}, "[scorers.j] combine: invalid enum value 'sum' (one of: mean, majority)"),
        ({"tempalte": "x"}, "[scorers.j] unknown key 'tempalte' (did you mean 'template'?)"),
    ],
)
def test_what_is_wrong_with_a_judge_is_one_line(change: dict[str, Any], line: str) -> None:
    section = {"kind": "judge", "url": "http://x/v1", "served_model": "m", "template": ASKED, **change}
    task = {"kind": "gym", "name": "spell_backward"}
    with pytest.raises((ConfigError, ModelError)) as caught:
        make_stage(make_config({"model": MODEL, "task": task, "scorers": {"j": section}}))
    assert str(caught.value).startswith(line), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_with_a_field_that_no_prompt_has_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("".join(f'{{"prompt": "{n} + 1?", "answer": "{n + 1}"}}\n' for n in range(9)))
    section = {"kind": "judge", "url": "http://x/v1", "served_model": "m", "template": "{completion} {anser}"}
    raw = {
        "model": MODEL,
        "task": {"kind": "dataset", "path": str(tmp_path / "train.jsonl")},
        "evaluate": {"prompts": 2},
    }
    line = r"^\[scorers.j\] template: the template wants 'anser', which this prompt does not have \(it has answer, "
    with pytest.raises(ConfigError, match=line):
        check_inputs(make_config({**raw, "scorers": {"j": section}}))
    check_inputs(make_config({**raw, "scorers": {"j": {**section, "template": ASKED}}}))


def test_the_key_of_a_server_may_end_with_a_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret\n")
    assert read_api_key("scorers.j", "JUDGE_KEY") == "secret"


def test_a_section_survives_being_written_and_read(tmp_path: Path) -> None:
    section = {"kind": "judge", "model": str(tmp_path), "template": ASKED, "words": {"yes": 1.0}, "gpus": "0"}
    task = {"kind": "gym", "name": "spell_backward"}
    config = make_config({"model": MODEL, "task": task, "scorers": {"j": section, "f": {"scorer": "m:f"}}})
    written = tmp_path / "config.toml"
    written.write_text(dump_config(config))
    assert load_config(written) == config
    assert config.scorers["j"] == JudgeConfig(**{key: value for key, value in section.items() if key != "kind"})
    assert list(config.scorer_models) == ["scorers.j"]

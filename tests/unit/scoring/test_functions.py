from __future__ import annotations

import asyncio
import functools
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.scoring.base import ScoreError
from headrace.scoring.functions import Question, call, check_signature, in_list_style, judge, judgement

QUESTION = Question(
    completion="C",
    messages=[{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
    data={"answer": 4, "level": "hard"},
)
EVERYTHING = {"completion": "C", "prompt": "Q", "messages": QUESTION.messages, "data": QUESTION.data, **QUESTION.data}


class Callable:
    def __call__(self, completion: str, *, level: str) -> Any:
        return completion, level


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (lambda completion: completion, "C"),
        (lambda prompt, completion: (prompt, completion), ("Q", "C")),
        (lambda completion, /, prompt: (completion, prompt), ("C", "Q")),
        (lambda completion, answer, other=9: (completion, answer, other), ("C", 4, 9)),
        (lambda completion, *rest, answer: (completion, rest, answer), ("C", (), 4)),
        (lambda **fields: fields, EVERYTHING),
        (lambda answer, **fields: (answer, sorted(fields)), (4, ["completion", "data", "level", "messages", "prompt"])),
        (lambda completion, /, **fields: (completion, "completion" in fields), ("C", False)),
        (lambda completion, data, messages: (data, messages[0]["content"]), (QUESTION.data, "S")),
        (Callable(), ("C", "hard")),
        (functools.partial(lambda completion, scale: completion * scale, scale=2), "CC"),
    ],
)
def test_a_function_gets_what_it_declares(function: Any, seen: Any) -> None:
    check_signature(function, "f")
    assert call(function, QUESTION) == seen


def test_the_prompt_is_text_where_it_is_one_text() -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    asked = {
        "several": Question(completion="", messages=turns),
        "text": Question(completion="", messages=[], text="as it is"),
    }
    assert call(lambda prompt, completion: prompt, asked["several"]) == turns
    assert call(lambda prompt, completion: prompt, asked["text"]) == "as it is"


def test_fields_of_the_data_cannot_hide_the_answer() -> None:
    question = Question(completion="C", messages=[], text="P", data={"completion": 1, "prompt": 2, "data": 3})
    assert call(lambda completion, prompt, data: (completion, prompt, data), question) == ("C", "P", 3)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ScoreError, match=r"wants 'solution', which this prompt does not have \(it has answer, level\)"):
        call(lambda completion, solution: 0, QUESTION)


def test_what_a_function_raises_is_one_line() -> None:
    def reward(completion: str) -> float:
        raise KeyError("two\nlines")

    with pytest.raises(ScoreError, match=r"raised KeyError: .*\(test_functions\.py, line \d+\)$"):
        call(reward, QUESTION)


def test_functions_that_cannot_be_rewards() -> None:
    with pytest.raises(ConfigError, match=r"f takes \(text, answer\), but a reward function must take `completion` "):
        check_signature(lambda text, answer: 0, "f")
    with pytest.raises(ConfigError, match="has no signature"):
        check_signature(max, "max")


LISTS = msgspec.structs.replace(QUESTION, as_text=True, token_ids=[5, 6])


@pytest.mark.parametrize(
    ("function", "seen"),
    [
        (lambda completions: completions, ["C"]),
        (lambda completions, answer, **kwargs: (answer, sorted(kwargs)), ([4], ["completion_ids", "level", "prompts"])),
        (lambda prompts, completions, level=None: (prompts, level), (["Q"], ["hard"])),
        (lambda completions, other=9: other, 9),
        (lambda completion_ids, **kwargs: completion_ids, [[5, 6]]),
    ],
)
def test_a_function_in_list_style_gets_lists(function: Any, seen: Any) -> None:
    check_signature(function, "f")
    assert in_list_style(function)
    assert call(function, LISTS) == seen


def test_both_names_are_one_answer() -> None:
    assert not in_list_style(lambda completion, completions=(): 0)
    assert not in_list_style(lambda **fields: 0)


def test_messages_are_answered_by_messages_in_list_style() -> None:
    both = call(lambda prompts, completions: (prompts, completions), QUESTION)
    assert both == ([QUESTION.messages], [[{"role": "assistant", "content": "C"}]])
    raw = Question(completion="C", messages=[], text="as it is")
    assert call(lambda prompts, completions: (prompts, completions), raw) == (["as it is"], ["C"])


def test_a_list_of_one_is_judged() -> None:
    def given(result: Any) -> float | None:
        return judge(lambda completions: result, LISTS, asyncio.run).reward

    async def later(completions: list[str], **fields: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    assert given([0.5]) == 0.5
    assert given((1,)) == 1.0
    assert given(np.asarray([2.0])) == 2.0
    assert given([None]) is None
    assert judge(later, LISTS, asyncio.run).reward == 1.0
    for result, problem in [
        (1.0, "gave a float, not a list of numbers"),
        (None, "gave a NoneType, not a list of numbers"),
        ("1", "gave a str, not a list of numbers"),
        ([], "gave 0 numbers for 1 answer"),
        ([1.0, 2.0], "gave 2 numbers for 1 answer"),
        (["1"], "gave a str, not a number"),
        ([float("nan")], "gave nan, not a finite number"),
        (np.asarray(1.0), "raised TypeError: iteration over a 0-d array"),
        ((1 / number for number in [0]), "raised ZeroDivisionError: division by zero"),
    ]:
        with pytest.raises(ScoreError, match=problem):
            given(result)


@pytest.mark.parametrize(
    ("result", "reward", "metrics"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (-0.5, -0.5, {}),
        (np.float32(0.25), 0.25, {}),
        (np.bool_(True), 1.0, {}),
        (np.asarray(2), 2.0, {}),
        ({"reward": 1, "length": np.int64(3)}, 1.0, {"length": 3.0}),
    ],
)
def test_numbers(result: Any, reward: float, metrics: dict[str, float]) -> None:
    found = judgement(result)
    assert (found.reward, found.metrics) == (reward, metrics)
    assert type(found.reward) is float


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        (None, "gave a NoneType, not a number"),
        ("1.0", "gave a str, not a number"),
        ([1.0], "gave a list, not a number"),
        (np.asarray([1.0, 2.0]), "gave a ndarray, not a number"),
        (float("nan"), "gave nan, not a finite number"),
        (float("-inf"), "gave -inf, not a finite number"),
        ({"score": 1.0}, r'gave a dict without "reward" \(it has score\)'),
        ({"reward": None}, "gave, as 'reward', a NoneType, not a number"),
        ({"reward": 1.0, "note": "good"}, "gave, as 'note', a str, not a number"),
    ],
)
def test_what_is_not_a_number(result: Any, problem: str) -> None:
    with pytest.raises(ScoreError, match=problem):
        judgement(result)

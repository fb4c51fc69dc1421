from __future__ import annotations

import ast
import operator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.tasks.calculator import ArithmeticProblem, CalculatorEpisode, CalculatorTask, evaluate, render
from headrace.tasks.dataset import prompt_content
from headrace.types import Prompt

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def reference(expression: str) -> Fraction:
    """Python's own parser, over fractions."""

    def value(node: Any) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))  # type: ignore[no-any-return]
        if isinstance(node, ast.UnaryOp):
            return -value(node.operand) if isinstance(node.op, ast.USub) else value(node.operand)
        return Fraction(str(node.value))

    return value(ast.parse(expression, mode="eval").body)


NUMBERS = st.one_of(st.integers(0, 999).map(str), st.decimals(0, 99, places=2).map(str))
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " - "]), inner).map("".join),
        inner.map(lambda e: f"({e})"),
        inner.map(lambda e: f"-{e}"),
    ),
    max_leaves=10,
).filter(lambda e: len(e) <= 120)


@given(EXPRESSIONS)
def test_arithmetic_is_pythons(expression: str) -> None:
    try:
        expected = reference(expression)
    except ZeroDivisionError:
        with pytest.raises(ArithmeticProblem, match="division by zero"):
            evaluate(expression)
        return
    assert evaluate(expression) == expected


@given(st.text(alphabet="0123456789.+-*/() ex_", max_size=140))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    try:
        evaluate(text)
    except ArithmeticProblem as problem:
        assert str(problem)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "it ends too early"),
        ("2+", "it ends too early"),
        ("2 3", "unexpected '3'"),
        ("(2", "it ends too early"),
        ("(2 3)", "a parenthesis is not closed"),
        ("2**3", "unexpected '*'"),
        ("__import__('os')", "unexpected '_'"),
        ("1/0", "division by zero"),
        ("(" * 121, "longer than 120 characters"),
    ],
)
def test_problems(expression: str, problem: str) -> None:
    with pytest.raises(ArithmeticProblem) as caught:
        evaluate(expression)
    assert str(caught.value) == problem


def test_rendering() -> None:
    assert render(Fraction(10**30)) == "1" + "0" * 30
    assert render(Fraction(-1, 3)) == "-0.333333"


def episode(**options: Any) -> CalculatorEpisode:
    prompt = Prompt(id="x", messages=[{"role": "user", "content": "12*34+7?"}], data={"answer": "415"})
    return CalculatorEpisode(prompt, **{"max_turns": 3, "call_reward": 0.0, "role": "user"} | options)


async def test_an_episode_with_the_tool() -> None:
    environment = episode(role="tool")
    assert await environment.reset() == [{"role": "user", "content": "12*34+7?"}]
    step = await environment.step("First <calc> 12*34 </calc>")
    assert step.messages == [{"role": "tool", "content": "12*34 = 408"}]
    assert not step.done and step.reward is None
    step = await environment.step("so <answer> 415 </answer>")
    assert (step.done, step.reward, step.messages) == (True, 1.0, [])
    assert step.metrics == {"answered": 1.0, "calls": 1.0, "bad_calls": 0.0}
    await environment.close()


async def test_bad_calls_are_answered_with_the_reason() -> None:
    environment = episode()
    step = await environment.step("<calc>12x34</calc> and <calc>7-9</calc>")
    assert step.messages[0]["content"] == "error: unexpected 'x'\n7-9 = -2"
    step = await environment.step("I do not know what to do")
    assert step.messages[0]["content"].startswith("Write <calc>")
    step = await environment.step("<calc>1</calc>")
    assert (step.done, step.reward) == (True, 0.0)
    assert step.metrics == {"answered": 0.0, "calls": 3.0, "bad_calls": 1.0}


@pytest.mark.parametrize(
    ("answer", "reward"),
    [("415", 1.0), ("415.0", 1.0), ("0415", 1.0), ("414", 0.0), ("408+7", 0.0), ("", 0.0), ("1e999999999", 0.0),
     ("830/2", 0.0), ("four", 0.0)],
)  # fmt: skip
async def test_answers(answer: str, reward: float) -> None:
    step = await episode().step(f"<answer>{answer}</answer>")
    assert (step.done, step.reward) == (True, reward)


async def test_part_of_the_reward_may_be_for_using_the_tool() -> None:
    guessed = await episode(call_reward=0.4).step("<answer>415</answer>")
    assert guessed.reward == pytest.approx(0.6)
    environment = episode(call_reward=0.4)
    await environment.step("<calc>oops</calc>")
    assert (await environment.step("<answer>415</answer>")).reward == pytest.approx(0.6)
    environment = episode(call_reward=0.4)
    await environment.step("<calc>408+7</calc>")
    assert (await environment.step("<answer>415</answer>")).reward == 1.0


async def test_a_task_gives_seeded_disjoint_prompts_with_right_answers() -> None:
    task = CalculatorTask(seed=5, heldout=30, size=60, digits=1, operations=2)
    again = CalculatorTask(seed=5, heldout=30, size=60, digits=1, operations=2)
    other = CalculatorTask(seed=6, heldout=30, size=60, digits=1, operations=2)
    assert (list(task.train), list(task.heldout)) == (list(again.train), list(again.heldout))
    assert list(task.train) != list(other.train)
    everything = [*task.train, *task.heldout]
    assert len({p.id for p in everything}) == len({prompt_content(p) for p in everything}) == 90
    for prompt in everything:
        assert Fraction(prompt.data["answer"]) == reference(prompt.data["expression"])
        assert prompt.data["expression"] in prompt.messages[0]["content"]  # type: ignore[index]
        demonstration = task.demonstration(prompt)
        assert demonstration is not None
        assert (await task.episode(prompt).step(demonstration)).reward == 1.0


async def test_long_right_answers_are_right() -> None:
    task = CalculatorTask(seed=5, heldout=1, size=5, digits=20, operations=4, operators=["*"])
    for prompt in task.train:
        step = await task.episode(prompt).step(str(task.demonstration(prompt)))
        assert step.reward == 1.0 and len(prompt.data["answer"]) > 40


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"digits": 0}, "digits must be at least 1, not 0"),
        ({"operators": ["**"]}, r"operators must be some of \+ - \*"),
        ({"call_reward": 2}, "call_reward must be between 0 and 1"),
        ({"digits": 1, "operations": 1, "size": 5000}, "too few expressions"),
        ({"digits": 40, "operations": 3}, "longer than 120 characters"),
    ],
)
def test_mistakes(config: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        CalculatorTask(seed=0, heldout=10, **config)

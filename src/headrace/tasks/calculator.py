"""A small environment with a tool: the policy may ask a calculator before it answers.

    user         What is 12*34+7?
    policy       <calc>12*34</calc>
    environment  12*34 = 408
    policy       <answer>415</answer>

The environment's messages are context and are never trained on. `CalculatorTask` is also the pattern for your own
environment: with `[task] kind = "environment"`, the key `factory` names what is called as `factory(**config, seed=...,
heldout=...)` and returns a `Task`.

The calculator is exact: + - * / and parentheses over numbers. What the policy writes is parsed and never executed.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence
from fractions import Fraction

from headrace.errors import ConfigError
from headrace.tasks.base import Environment, EnvironmentStep, Task
from headrace.types import Prompt

INSTRUCTIONS = (
    "You can use a calculator: write <calc>12*34</calc> and stop, and its result will be given to you. "
    "When you know the result, write <answer>408</answer>."
)

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_CALLS_PER_TURN = 8

LONGEST = 120
"""The most characters of an expression. This bounds the depth of the parser and the size of every number."""
_NUMBER = re.compile(rf"[-+]?\d{{1,{LONGEST}}}(\.\d{{1,{LONGEST}}})?")

_TOKEN = re.compile(r"\d+\.\d+|\d+|\S")
_OPERATORS = {"+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv)}
"""How tight each operator binds, and what it does."""


class CalculatorTask(Task):
    """A task of seeded arithmetic questions, which the policy answers with the help of a calculator."""

    def __init__(
        self,
        *,
        seed: int,
        heldout: int,
        size: int = 1000,
        digits: int = 2,
        operations: int = 2,
        operators: Sequence[str] = ("+", "-", "*"),
        max_turns: int = 4,
        call_reward: float = 0.0,
        role: str = "user",
    ) -> None:
        """Make `size` training questions of `operations` operators on numbers of up to `digits` digits.

        After `max_turns` turns without an answer the episode ends with reward 0. A right answer earns 1, but only 1 -
        `call_reward` if the calculator was never used successfully. `role` is the role that speaks for the calculator:
        `tool`, for example, if the chat template knows that role.
        """
        for name, value in (("size", size), ("digits", digits), ("operations", operations), ("max_turns", max_turns)):
            if value < 1:
                raise ConfigError(f"[task] config: calculator {name} must be at least 1, not {value}")
        if digits * (operations + 1) + operations > LONGEST:
            raise ConfigError(
                f"[task] config: calculator questions of {digits} digits and {operations} operations are longer than "
                f"{LONGEST} characters"
            )
        if not operators or any(one not in ("+", "-", "*") for one in operators):
            raise ConfigError(f"[task] config: calculator operators must be some of + - *, not {list(operators)}")
        if not 0 <= call_reward <= 1:
            raise ConfigError(f"[task] config: calculator call_reward must be between 0 and 1, not {call_reward}")
        expressions = _expressions(random.Random(seed), size + heldout, digits, operations, operators)
        prompts = [_prompt(expression) for expression in expressions]
        self.train: Sequence[Prompt] = prompts[heldout:]
        self.heldout: Sequence[Prompt] = prompts[:heldout]
        self._max_turns = max_turns
        self._call_reward = call_reward
        self._role = role

    def episode(self, prompt: Prompt) -> CalculatorEpisode:
        """Make a fresh environment for one rollout of this prompt."""
        return CalculatorEpisode(prompt, max_turns=self._max_turns, call_reward=self._call_reward, role=self._role)

    def demonstration(self, prompt: Prompt) -> str | None:
        """Return the answer alone, as the last turn of an episode would give it."""
        return f"<answer>{prompt.data['answer']}</answer>"


class CalculatorEpisode(Environment):
    """An environment for one question. Turns are calls of the calculator until one is an answer."""

    def __init__(self, prompt: Prompt, *, max_turns: int, call_reward: float, role: str) -> None:
        self._prompt = prompt
        self._max_turns = max_turns
        self._call_reward = call_reward
        self._role = role
        self._turns = 0
        self._calls = 0
        self._bad_calls = 0

    async def reset(self) -> list[dict[str, str]]:
        """Return the question and how to use the calculator."""
        return list(self._prompt.messages or [])

    async def step(self, completion: str) -> EnvironmentStep:
        """Compute what the policy asks for, or judge its answer. An answer ends the episode."""
        self._turns += 1
        answers = _ANSWER.findall(completion)
        if answers:
            return self._end(answered=True, correct=_equal(answers[-1], self._prompt.data["answer"]))
        reply = self._reply(_CALL.findall(completion))
        if self._turns >= self._max_turns:
            return self._end(answered=False, correct=False)
        return EnvironmentStep(messages=[{"role": self._role, "content": reply}])

    def _reply(self, calls: list[str]) -> str:
        if not calls:
            return "Write <calc>...</calc> to compute something, or <answer>...</answer> to answer."
        return "\n".join(self._compute(call.strip()) for call in calls[:_CALLS_PER_TURN])

    def _compute(self, expression: str) -> str:
        self._calls += 1
        try:
            return f"{expression} = {render(evaluate(expression))}"
        except ArithmeticProblem as problem:
            self._bad_calls += 1
            return f"error: {problem}"

    def _end(self, *, answered: bool, correct: bool) -> EnvironmentStep:
        reward = 0.0
        if correct:
            reward = 1.0 if self._calls > self._bad_calls else 1.0 - self._call_reward
        metrics = {"answered": float(answered), "calls": float(self._calls), "bad_calls": float(self._bad_calls)}
        return EnvironmentStep(done=True, reward=reward, metrics=metrics)


def _prompt(expression: str) -> Prompt:
    question = f"What is {expression}?\n{INSTRUCTIONS}"
    return Prompt(
        id=f"calculator/{expression}",
        messages=[{"role": "user", "content": question}],
        data={"expression": expression, "answer": render(evaluate(expression))},
    )


def _expressions(rng: random.Random, count: int, digits: int, operations: int, operators: Sequence[str]) -> list[str]:
    """Return different expressions, in the order in which the seed gives them."""
    found: dict[str, None] = {}
    for _ in range(20 * count + 1000):
        parts = [str(rng.randrange(10**digits))]
        for _ in range(operations):
            parts += [rng.choice(list(operators)), str(rng.randrange(10**digits))]
        found["".join(parts)] = None
        if len(found) == count:
            return list(found)
    raise ConfigError(
        f"[task] config: calculator has too few expressions of {digits} digits and {operations} operations "
        f"for {count} prompts"
    )


def _equal(answer: str, right: str) -> bool:
    """Return whether the answer equals the right one as a number. The answer must *be* a number, not an expression."""
    text = answer.strip().replace(",", "")
    return _NUMBER.fullmatch(text) is not None and Fraction(text) == Fraction(right)


# ---- the calculator


class ArithmeticProblem(ValueError):
    """An expression that has no value. The text says why, for the policy to read."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression. Raises `ArithmeticProblem`."""
    if len(expression) > LONGEST:
        raise ArithmeticProblem(f"longer than {LONGEST} characters")
    tokens = _TOKEN.findall(expression)[::-1]
    try:
        value = _value(tokens, 1)
    except ZeroDivisionError:
        raise ArithmeticProblem("division by zero") from None
    if tokens:
        raise ArithmeticProblem(f"unexpected {tokens[-1]!r}")
    return value


def render(value: Fraction) -> str:
    """Return a value as people write it: whole numbers exactly, others to six significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _value(tokens: list[str], binding: int) -> Fraction:
    """Take an expression off the tokens, whose first one is at the end of the list.

    An operator takes to its right everything that binds tighter than itself.
    """
    left = _operand(tokens)
    while tokens and tokens[-1] in _OPERATORS and _OPERATORS[tokens[-1]][0] >= binding:
        own, apply = _OPERATORS[tokens.pop()]
        left = apply(left, _value(tokens, own + 1))
    return left


def _operand(tokens: list[str]) -> Fraction:
    token = _take(tokens)
    if token in ("+", "-"):
        value = _operand(tokens)
        return -value if token == "-" else value
    if token == "(":
        value = _value(tokens, 1)
        if _take(tokens) != ")":
            raise ArithmeticProblem("a parenthesis is not closed")
        return value
    if not token[0].isdecimal():
        raise ArithmeticProblem(f"unexpected {token!r}")
    return Fraction(token)


def _take(tokens: list[str]) -> str:
    if not tokens:
        raise ArithmeticProblem("it ends too early")
    return tokens.pop()

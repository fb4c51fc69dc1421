"""A small environment with a tool: the policy may ask a calculator before it answers.

    policy       <calc>12*34</calc>
    environment  12*34 = 408
    policy       <answer>415</answer>

The environment's messages are context and are never trained on. `CalculatorTask` is also the pattern for your own
environment: `[task] kind = "environment"` names a factory, which is called as `factory(**config, seed=...,
heldout=...)` and returns a `Task`.

The calculator is exact: + - * / and parentheses over numbers. What the policy writes is parsed and never executed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from fractions import Fraction

from headrace.errors import ConfigError
from headrace.tasks.base import EnvironmentStep
from headrace.types import Prompt

INSTRUCTIONS = (
    "You can use a calculator: write <calc>12*34</calc> and stop, and its result will be given to you. "
    "When you know the result, write <answer>408</answer>."
)

_CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d{1,40}(\.\d{1,40})?")
_CALLS_PER_TURN = 8

LONGEST = 120
"""The most characters of an expression. This bounds the depth of the parser and the size of every number."""

_TOKEN = re.compile(r"\s*(\d+\.\d+|\d+|[-+*/()])")
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}


class CalculatorTask:
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
        `call_reward` if the calculator was never used successfully. `role` is the role that speaks for the calculator;
        chat templates that know the role `tool` may take it.
        """
        for name, value in (("size", size), ("digits", digits), ("operations", operations), ("max_turns", max_turns)):
            if value < 1:
                raise ConfigError(f"[task] config: calculator {name} must be at least 1, not {value}")
        if not operators or any(operator not in ("+", "-", "*") for operator in operators):
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

    async def close(self) -> None:
        """Do nothing: the task holds nothing."""


class CalculatorEpisode:
    """An environment for one question.

    The policy's turns are calls of the calculator until one of them is an answer.
    """

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

    async def close(self) -> None:
        """Do nothing: the environment holds nothing."""

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
        if len(found) == count:
            break
        parts = [str(rng.randrange(10**digits))]
        for _ in range(operations):
            parts += [rng.choice(list(operators)), str(rng.randrange(10**digits))]
        found["".join(parts)] = None
    if len(found) < count:
        raise ConfigError(
            f"[task] config: calculator has too few expressions of {digits} digits and {operations} operations "
            f"for {count} prompts"
        )
    return list(found)


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
    parser = _Parser(_tokens(expression))
    value = parser.expression(1)
    if parser.next is not None:
        raise ArithmeticProblem(f"unexpected {parser.next!r}")
    return value


def render(value: Fraction) -> str:
    """Return a value as people write it: whole numbers exactly, others to six significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _tokens(expression: str) -> list[str]:
    tokens: list[str] = []
    text = expression.strip()
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ArithmeticProblem(f"unexpected {text[position:].strip()[:1]!r}")
        tokens.append(match.group(1))
        position = match.end()
    return tokens


class _Parser:
    """A precedence-climbing parser: an operator takes to its right everything that binds tighter than itself."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._position = 0

    @property
    def next(self) -> str | None:
        return self._tokens[self._position] if self._position < len(self._tokens) else None

    def expression(self, binding: int) -> Fraction:
        left = self._operand()
        while self.next is not None and _BINDING.get(self.next, 0) >= binding:
            operator = self._take()
            right = self.expression(_BINDING[operator] + 1)
            left = _apply(operator, left, right)
        return left

    def _operand(self) -> Fraction:
        token = self._take()
        if token in ("+", "-"):
            value = self._operand()
            return -value if token == "-" else value
        if token == "(":
            value = self.expression(1)
            if self._take() != ")":
                raise ArithmeticProblem("a parenthesis is not closed")
            return value
        if token in (")", "*", "/"):
            raise ArithmeticProblem(f"unexpected {token!r}")
        return Fraction(token)

    def _take(self) -> str:
        token = self.next
        if token is None:
            raise ArithmeticProblem("it ends too early")
        self._position += 1
        return token


def _apply(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0:
        raise ArithmeticProblem("division by zero")
    return left / right

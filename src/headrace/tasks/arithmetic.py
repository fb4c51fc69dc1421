"""Exact arithmetic on text: + - * / and parentheses over numbers. The text is parsed and never executed."""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST = 120
"""The most characters of an expression. This bounds the depth of the parser and the size of every number."""

_TOKEN = re.compile(r"\s*(\d+\.\d+|\d+|[-+*/()])")
_BINDING = {"+": 1, "-": 1, "*": 2, "/": 2}


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

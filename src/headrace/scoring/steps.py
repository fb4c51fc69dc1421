"""This module cuts the growing token stream of a rollout into steps.

A step ends with a marker, which is a token that the policy sampled, such as one that holds a line break. A step begins
after the step before it, or where the policy's turn begins: context such as a prompt or a tool's answer belongs to no
step. Tokens after the last marker are no step.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import repeat

from headrace.types import NO_VERSION, Float64Array, Trace


@dataclass(frozen=True)
class Step:
    """A step that has ended."""

    start: int
    """The position of its first token in the trace."""
    end: int
    """The position after its marker."""
    began: float | None = None
    """When its first token was sampled, by the engine's clock; None if the engine does not tell."""
    ended: float | None = None
    """When its marker was sampled."""


class StepCutter:
    """Cuts one trace, which is given to it part by part and in order."""

    def __init__(self, markers: Collection[int]) -> None:
        self._markers = frozenset(markers)
        self._length = 0
        self._first: tuple[int, float | None] | None = None
        """The position and time of the first token of the step that has not ended yet; None before that token."""

    def take(self, tokens: Trace, times: Float64Array | None = None) -> list[Step]:
        """Take the next tokens of the trace, and return the steps that end among them."""
        steps = []
        moments: Iterable[float | None] = repeat(None) if times is None else times.tolist()
        records = zip(tokens.token_ids.tolist(), tokens.versions.tolist(), moments, strict=False)
        for at, (token, version, moment) in enumerate(records, self._length):
            if version == NO_VERSION:
                self._first = None
                continue
            if self._first is None:
                self._first = at, moment
            if token in self._markers:
                start, began = self._first
                steps.append(Step(start, at + 1, began, moment))
                self._first = None
        self._length += len(tokens)
        return steps

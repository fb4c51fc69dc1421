"""The open questions to scorers: who is asked, and when a question to each scorer last ended.

A run in which nothing moves is no stall while a scorer may still take its time. A scorer that is silent for longer than
its limits allow is no excuse any more.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(eq=False)
class _Asked:
    """A scorer that has open questions."""

    since: float
    """When a question to it last ended; before that, when the first of its open questions was asked."""
    answers_within: float
    questions: int = 0


class OpenQuestions:
    """The open questions of a run, by who is asked. Used from one event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._asked: dict[str, _Asked] = {}

    @contextmanager
    def ask(self, who: str, answers_within: float) -> Iterator[None]:
        """Count a question as open inside this context. One of the questions to `who` must end within these seconds."""
        asked = self._asked.setdefault(who, _Asked(self._clock(), answers_within))
        asked.questions += 1
        try:
            yield
        finally:
            asked.questions -= 1
            # A scorer answers a limited number of questions at a time, so the next one may begin only now.
            asked.since = self._clock()
            if not asked.questions:
                del self._asked[who]

    @property
    def within_limits(self) -> bool:
        """Whether anybody who has open questions may still take time to answer."""
        now = self._clock()
        return any(now - asked.since <= asked.answers_within for asked in self._asked.values())

    def silent(self) -> dict[str, tuple[int, float]]:
        """Return the number of open questions, and the seconds since one has last ended, by who is asked."""
        now = self._clock()
        return {who: (asked.questions, now - asked.since) for who, asked in self._asked.items()}

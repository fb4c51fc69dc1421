"""How a scorer asks something that may be slow, dead or wrong: limited in number, in time, and with retries.

Every question ends: with an answer, or with a `ScoreError` that says why there is none.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.config.scorers import ServedScorerSection
from headrace.scoring.base import ScoreError

T = TypeVar("T")

FIRST_PAUSE = 0.25
"""Seconds before a question is asked again. The pause doubles with each further attempt."""


class NoUseToRetry(ScoreError):
    """The question cannot be answered, and asking it again would not change that."""


class Asking:
    """The questions of one scorer to what answers them."""

    def __init__(self, concurrency: int, timeout: float, retries: int) -> None:
        """`timeout` is the number of seconds of one attempt. A question has `retries` more attempts than one."""
        self._places = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._timeout = timeout
        self._retries = retries
        self._waiting = 0

    @classmethod
    def of(cls, section: ServedScorerSection) -> "Asking":
        """Make it with the limits of a section of the configuration."""
        return cls(section.concurrency, section.timeout, section.retries)

    @property
    def longest(self) -> float:
        """The seconds after which a question that has a place has ended."""
        pauses = FIRST_PAUSE * sum(float(2**attempt) for attempt in range(self._retries))
        return self._timeout * (self._retries + 1) + pauses

    async def ask(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Wait for a place, and call `attempt` with 0, 1, ... until it returns. Raises the last `ScoreError`."""
        # Each earlier question ends in a limited time, so this deadline is not reached while questions are answered.
        longest = (self._waiting // self._concurrency + 2) * self.longest
        self._waiting += 1
        try:
            async with asyncio.timeout(longest):
                await self._places.acquire()
        except TimeoutError:
            raise ScoreError(f"no place was free within {longest:g} s") from None
        finally:
            self._waiting -= 1
        try:
            return await self._attempts(attempt)
        finally:
            self._places.release()

    async def _attempts(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        for number in range(self._retries + 1):
            try:
                async with asyncio.timeout(self._timeout):
                    return await attempt(number)
            except NoUseToRetry:
                raise
            except TimeoutError:
                failure = ScoreError(f"there was no answer within {self._timeout:g} s")
            except ScoreError as error:
                failure = error
            if number == self._retries:
                raise failure
            await asyncio.sleep(FIRST_PAUSE * 2**number)
        raise AssertionError("unreachable")

"""How a scorer asks something that may be slow, dead or wrong: limited in number, in time, and with retries.

Every question ends: with an answer, or with a `ScoreError` that says why there is none. While nothing can be reached,
questions wait. Otherwise an outage of a few seconds would fail every group that is under way, and all that follow.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace.config.scorers import ServedScorerSection
from headrace.scoring.base import ScoreError
from headrace.scoring.limits import FIRST_PAUSE, longest_question, longest_wait, next_pause

T = TypeVar("T")


class NoUseToRetry(ScoreError):
    """The question cannot be answered, and asking it again would not change that."""


class Unreachable(ScoreError):
    """What would answer the question cannot be reached now."""


class Asking:
    """The questions of one scorer to what answers them."""

    def __init__(self, section: ServedScorerSection, *, timed: bool = True) -> None:
        """Take the limits of a section of the configuration. If not `timed`, attempts keep the timeout themselves."""
        self._timeout = section.timeout if timed else None
        self._places = asyncio.Semaphore(section.concurrency)
        self._section = section
        self._waiting = 0
        self.longest = longest_question(section)
        """The seconds within which a question that has a place has ended."""

    async def ask(self, attempt: Callable[[int], Awaitable[T]]) -> T:
        """Wait for a place, and call `attempt` with 0, 1, ... until it returns. Raises the last `ScoreError`."""
        # Each earlier question ends in a limited time, so this deadline is not reached while questions are answered.
        longest = longest_wait(self._waiting, self._section.concurrency, self.longest)
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
        began, number, pause = time.monotonic(), 0, FIRST_PAUSE
        while True:
            try:
                async with asyncio.timeout(self._timeout):
                    return await attempt(number)
            except NoUseToRetry:
                raise
            except TimeoutError:
                failure = ScoreError(f"there was no answer within {self._timeout:g} s")
            except ScoreError as error:
                failure = error
            if not isinstance(failure, Unreachable) or time.monotonic() - began > self._section.patience:
                number += 1
                if number > self._section.retries:
                    raise failure
            await asyncio.sleep(pause)
            pause = next_pause(pause)

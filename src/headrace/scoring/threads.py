"""A reward function of this process (such as a notebook's) runs in threads, so that it never blocks the event loop.

A thread cannot be killed. A thread that takes too long is left behind, and its judgement fails. Functions that may hang
belong in worker processes (`scoring.workers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading

from headrace.scoring.base import Judgement, ScoreError
from headrace.scoring.functions import (
    Question,
    RewardFunction,
    RewardScorer,
    call,
    check_signature,
    finish,
    judgement,
    source_version,
)
from headrace.types import Prompt


class ThreadScorer(RewardScorer):
    """A callable as a scorer. It judges `threads` answers at a time, in the order in which they are asked for."""

    def __init__(self, function: RewardFunction, timeout: float = 30.0, *, threads: int = 1) -> None:
        check_signature(function, f"the reward function {getattr(function, '__name__', function)!r}")
        self.version = source_version(function)
        self._function = function
        self._timeout = timeout
        self._threads = threads
        self._free = asyncio.Semaphore(threads)
        self._waiting = 0
        self._closed = False

    async def judge(self, prompt: Prompt, completion: str) -> Judgement:
        """Judge an answer. The time limit counts from when a thread starts on the answer."""
        question = Question(completion=completion, messages=prompt.messages or [], text=prompt.text, data=prompt.data)
        # Each earlier judgement takes at most its timeout, so this deadline is not reached while the threads work.
        longest = (self._waiting // self._threads + 2) * self._timeout
        self._waiting += 1
        try:
            async with asyncio.timeout(longest):
                await self._free.acquire()
        except TimeoutError:
            raise ScoreError(f"no thread was free to judge within {longest:g} s") from None
        finally:
            self._waiting -= 1
        try:
            if self._closed:
                raise ScoreError("the reward function is closed")
            async with asyncio.timeout(self._timeout):
                return await self._run(question)
        except TimeoutError:
            raise ScoreError(f"the reward function took more than {self._timeout:g} s") from None
        finally:
            self._free.release()

    async def close(self) -> None:
        """Refuse further judgements. Idempotent."""
        self._closed = True

    async def _run(self, question: Question) -> Judgement:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Judgement] = loop.create_future()

        def settle(result: Judgement | ScoreError) -> None:
            if answer.done():
                return
            if isinstance(result, ScoreError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        def work() -> None:
            result = _judge_here(self._function, question)
            # The run may be over when an overdue function returns.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result)

        threading.Thread(target=work, name="headrace-reward", daemon=True).start()
        return await answer


def _judge_here(function: RewardFunction, question: Question) -> Judgement | ScoreError:
    try:
        result = call(function, question)
        if inspect.isawaitable(result):
            result = asyncio.run(finish(result))
        return judgement(result)
    except ScoreError as error:
        return error

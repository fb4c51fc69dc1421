"""Reward functions as scorers, in worker processes or in threads, so that they never block the event loop.

A function that hangs, raises or dies costs one judgement, never the run. Each worker or thread judges one answer at a
time. A worker that took too long, died, or was abandoned during a judgement is killed with all its child processes. A
fresh worker takes its place when the next judgement needs it. A thread cannot be killed: a thread that takes too long
is left behind. Threads are for functions that exist only in this process, such as a notebook's.
"""

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from headrace.channel.worker_pool import PoolClosed, WorkerDied, WorkerPool
from headrace.errors import ConfigError
from headrace.scoring.base import Ended, Judgement, ScoreError, Scorer
from headrace.scoring.functions import (
    Question,
    RewardFunction,
    RewardSetup,
    ScoreReply,
    check_signature,
    judge,
    source_version,
)
from headrace.scoring.limits import longest_judgement, longest_wait
from headrace.types import Prompt, Score

HANGS_AFTER = 8
"""A function that took too long for so many answers, and has never judged one, is not called any more. Otherwise a run
whose reward function always hangs would wait for every answer of all its first groups."""


class TookTooLong(ScoreError):
    """A judgement took longer than `[scoring] timeout`."""


class RewardScorer(Scorer):
    """A reward function as a scorer. It gives one score to a whole rollout, based on the text of its last turn."""

    keeps_deadlines = True

    def __init__(
        self, places: asyncio.Semaphore, count: int, timeout: float, busy: str, *, start_timeout: float = 0.0
    ) -> None:
        """A judgement takes at most `timeout` seconds, and a start of what judges at most `start_timeout` seconds.

        There are `count` places. `busy` says that none of them was free.
        """
        self._places = places
        self._count = count
        self._timeout = timeout
        """The seconds that one judgement may take."""
        self._longest_turn = timeout + start_timeout
        self.answers_within = longest_judgement(timeout, start_timeout)
        self._busy = busy
        self._waiting = 0
        self._timeouts: int | None = 0
        """The number of answers that took too long before the first judgement; None after a judgement."""

    async def score(self, ended: Ended) -> list[Score]:
        """Return the judgement as a score; none if the function does not judge answers to this prompt."""
        tokens: list[int] = []
        if ended.turns:
            last = ended.turns[-1]
            tokens = ended.rollout.traces[last.trace].token_ids[last.start : last.end].tolist()
        judgement = await self.judge(ended.prompt, ended.completion, tokens)
        if judgement.reward is None:
            return []
        return [Score(value=judgement.reward, metrics=judgement.metrics, version=judgement.version)]

    async def judge(self, prompt: Prompt, completion: str, token_ids: Sequence[int] = ()) -> Judgement:
        """Judge an answer. Answers are judged in the order in which they are asked for.

        Raises `ScoreError` if the function raised, gave no number, took too long, or died. The function's time limit
        counts from when a worker or a thread starts on the answer. `token_ids` are those of the answer.
        """
        question = Question(
            completion=completion,
            messages=prompt.messages or [],
            text=prompt.text,
            data=prompt.data,
            as_text=prompt.as_text,
            token_ids=list(token_ids),
        )
        # Each earlier judgement takes a limited time, so this deadline is not reached while judgements go on.
        longest = longest_wait(self._waiting, self._count, self._longest_turn)
        self._waiting += 1
        try:
            async with asyncio.timeout(longest if self._places.locked() else None):
                await self._places.acquire()
        except TimeoutError:
            raise ScoreError(f"{self._busy} within {longest:g} s") from None
        finally:
            self._waiting -= 1
        try:
            if self._timeouts is not None and self._timeouts >= HANGS_AFTER:
                raise ScoreError(f"the reward function hangs: {HANGS_AFTER} answers took more than {self._timeout:g} s")
            judgement = await self._ask(question)
            self._timeouts = None
            return judgement
        except TookTooLong:
            if self._timeouts is not None:
                self._timeouts += 1
            raise
        finally:
            self._places.release()

    @abstractmethod
    async def _ask(self, question: Question) -> Judgement: ...


class WorkerScorer(RewardScorer):
    """A reward function in `workers` processes."""

    def __init__(
        self,
        reference: str,
        *,
        workers: int = 1,
        timeout: float = 30.0,
        arguments: dict[str, Any] | None = None,
        start_timeout: float = 60.0,
        log: Path | None = None,
        key: str = "",
        recycle: int = 10_000,
    ) -> None:
        """`reference` names the reward function or, with `arguments`, a factory of it (see `RewardSetup`).

        Output of the functions goes to `log`, or to this process's standard error. `key` is the key of the
        configuration that names the function, if it is not in `[task]`. After `recycle` judgements a worker is
        replaced, once its successor is ready.
        """
        key = key or ("[task] reward" if arguments is None else "")
        self._name = f"{key} {reference!r}" if key else "[task]"
        self._pool = WorkerPool(
            "headrace.scoring.worker_main",
            RewardSetup(reference=reference, arguments=arguments),
            workers=workers,
            start_timeout=start_timeout,
            name="reward worker",
            log=log,
            recycle=recycle,
        )
        super().__init__(self._pool.places, workers, timeout, "no reward worker was free", start_timeout=start_timeout)

    async def start(self) -> None:
        """Start every worker. Raises `ConfigError` if the reward function cannot be used."""
        try:
            await self._pool.start()
        except ConfigError as error:
            raise ConfigError(self._refusal(error)) from error

    async def close(self) -> None:
        """End all workers; running judgements fail. Idempotent."""
        await self._pool.close()

    async def _ask(self, question: Question) -> Judgement:
        try:
            body = msgspec.json.encode(question)
        except (TypeError, ValueError, RecursionError) as error:
            raise ScoreError(f"the prompt's data cannot be sent to a reward worker: {error}") from error
        try:
            try:
                answer = await self._pool.ask(body, ScoreReply, self._timeout)
            except WorkerDied:
                # The death need not be the fault of this answer, so another worker judges the answer, once.
                answer = await self._pool.ask(body, ScoreReply, self._timeout)
        except WorkerDied as error:
            raise ScoreError(f"the reward worker {error} during a judgement") from error
        except TimeoutError:
            raise TookTooLong(f"the reward function took more than {self._timeout:g} s") from None
        except PoolClosed:
            raise ScoreError("the reward workers are closed") from None
        except ConfigError as error:
            raise ScoreError(f"a reward worker could not be started again: {self._refusal(error)}") from error
        if answer.judgement is None:
            raise ScoreError(answer.error)
        return answer.judgement

    def _refusal(self, error: ConfigError) -> str:
        """Return why the reward function cannot be used, in one line."""
        text = str(error)
        return text if text.startswith("[") else f"{self._name}: {text}"


class ThreadScorer(RewardScorer):
    """A callable as a scorer, in `threads` threads."""

    def __init__(self, function: RewardFunction, timeout: float = 30.0, *, threads: int = 1) -> None:
        check_signature(function, f"the reward function {getattr(function, '__name__', function)!r}")
        super().__init__(asyncio.Semaphore(threads), threads, timeout, "no thread was free to judge")
        self.version = source_version(function)
        self._function = function
        self._closed = False

    async def close(self) -> None:
        """Refuse further judgements. Idempotent."""
        self._closed = True

    async def _ask(self, question: Question) -> Judgement:
        if self._closed:
            raise ScoreError("the reward function is closed")
        answer: Future[Judgement] = Future()
        answer.set_running_or_notify_cancel()

        def work() -> None:
            try:
                answer.set_result(judge(self._function, question, asyncio.run))
            except ScoreError as error:
                answer.set_exception(error)

        threading.Thread(target=work, name="headrace-reward", daemon=True).start()
        try:
            async with asyncio.timeout(self._timeout):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise TookTooLong(f"the reward function took more than {self._timeout:g} s") from None

"""Reward functions in worker processes. A function that hangs, raises or dies costs one judgement, never the run.

Each worker judges one answer at a time. A worker that took too long, died, or was abandoned during a judgement is
killed with all its child processes. A fresh worker takes its place when the next judgement needs it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from headrace.channel.worker_pool import PoolClosed, WorkerDied, WorkerPool
from headrace.errors import ConfigError
from headrace.scoring.base import Judgement, ScoreError
from headrace.scoring.functions import Question, RewardScorer
from headrace.scoring.messages import RewardSetup, ScoreReply
from headrace.types import Prompt


class WorkerScorer(RewardScorer):
    """A reward function in `workers` processes. Answers are judged in the order in which they are asked for."""

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
    ) -> None:
        """`reference` names the reward function or, with `arguments`, a factory of it (see `messages.RewardSetup`).

        `timeout` counts from when a worker starts on a judgement. Output of the functions goes to `log`, or to this
        process's standard error. `key` is the key of the configuration that names the function, if it is not in
        `[task]`.
        """
        key = key or ("[task] reward" if arguments is None else "")
        self._name = f"{key} {reference!r}" if key else "[task]"
        self._timeout = timeout
        self._workers = workers
        self._longest_turn = timeout + start_timeout
        self._waiting = 0
        self._pool = WorkerPool(
            "headrace.scoring.worker_main",
            RewardSetup(reference=reference, arguments=arguments),
            workers=workers,
            start_timeout=start_timeout,
            name="reward worker",
            log=log,
        )

    async def start(self) -> None:
        """Start every worker. Raises `ConfigError` if the reward function cannot be used."""
        try:
            await self._pool.start()
        except ConfigError as error:
            raise ConfigError(self._refusal(error)) from error

    async def judge(self, prompt: Prompt, completion: str) -> Judgement:
        """Judge an answer. Raises `ScoreError` if the function raised, gave no number, took too long, or died."""
        question = Question(completion=completion, messages=prompt.messages or [], text=prompt.text, data=prompt.data)
        try:
            body = msgspec.json.encode(question)
        except (TypeError, ValueError) as error:
            raise ScoreError(f"the prompt's data cannot be sent to a reward worker: {error}") from error
        await self._take_place()
        try:
            answer = await self._ask(body)
        finally:
            self._pool.places.release()
        if answer.judgement is None:
            raise ScoreError(answer.error)
        return answer.judgement

    async def close(self) -> None:
        """End all workers; running judgements fail. Idempotent."""
        await self._pool.close()

    async def _take_place(self) -> None:
        """Wait for a free worker, in turn.

        Each earlier judgement holds a worker for at most two starts and judgements.
        """
        longest = (self._waiting // self._workers + 2) * self._longest_turn
        self._waiting += 1
        try:
            async with asyncio.timeout(longest):
                await self._pool.places.acquire()
        except TimeoutError:
            raise ScoreError(f"no reward worker was free within {longest:g} s") from None
        finally:
            self._waiting -= 1

    async def _ask(self, question: bytes) -> ScoreReply:
        try:
            try:
                return await self._pool.ask(question, ScoreReply, self._timeout)
            except WorkerDied:
                # The death need not be the fault of this answer, so another worker judges the answer, once.
                return await self._pool.ask(question, ScoreReply, self._timeout)
        except WorkerDied as error:
            raise ScoreError(f"the reward worker {error} during a judgement") from error
        except TimeoutError:
            raise ScoreError(f"the reward function took more than {self._timeout:g} s") from None
        except PoolClosed:
            raise ScoreError("the reward workers are closed") from None
        except ConfigError as error:
            raise ScoreError(f"a reward worker could not be started again: {self._refusal(error)}") from error

    def _refusal(self, error: ConfigError) -> str:
        """Return why the reward function cannot be used, in one line."""
        text = str(error)
        return text if text.startswith("[") else f"{self._name}: {text}"

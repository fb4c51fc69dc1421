"""Reward functions in processes of their own: one that hangs, raises or dies costs one judgement, never the run.

Each worker judges one answer at a time. A worker that overran its time, died, or was abandoned half-way is killed with
all that it started, and its place is taken by a fresh one when the next judgement needs it.
"""

from __future__ import annotations

import asyncio
from asyncio.subprocess import Process
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.channel import pipes
from headrace.errors import ConfigError
from headrace.scoring.base import Judgement, ScoreError
from headrace.scoring.frames import HEADER, Answer, Hello, Setup, pack, unpack
from headrace.scoring.functions import Question, RewardScorer
from headrace.types import Prompt

T = TypeVar("T")


class WorkerScorer(RewardScorer):
    """A reward function in `workers` processes; judgements are taken in the order in which they are asked for."""

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
        """`reference` names the reward function; with `arguments`, a maker that returns it (see `frames.Setup`).

        `timeout` counts from when a worker starts on a judgement. What the functions print goes to `log`, or to this
        process's standard error. `key` is the key of the configuration that names the function, if not `[task]`.
        """
        self._key = key or ("[task] reward" if arguments is None else "")
        self._setup = Setup(reference=reference, arguments=arguments)
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._log = log
        self._directory = Path.cwd()
        self._places = [_Place() for _ in range(workers)]
        self._free: asyncio.Queue[_Place] = asyncio.Queue()
        for place in self._places:
            self._free.put_nowait(place)
        self._waiting = 0
        self._asked = 0
        self._closed = False

    async def start(self) -> None:
        """Start every worker; raises `ConfigError` if the reward function cannot be used."""
        results = await asyncio.gather(*map(self._fill, self._places), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.close()
            raise self._refusal(errors[0]) from errors[0]

    async def judge(self, prompt: Prompt, completion: str) -> Judgement:
        """The judgement; raises `ScoreError` when the function raised, gave no number, took too long, or died."""
        self._asked += 1
        question = Question(
            id=self._asked,
            completion=completion,
            messages=prompt.messages or [],
            text=prompt.text,
            data=prompt.data,
        )
        try:
            frame = pack(question)
        except (TypeError, ValueError) as error:
            raise ScoreError(f"the prompt's data cannot be sent to a reward worker: {error}") from error
        place = await self._take()
        try:
            if self._closed:
                raise ScoreError("the reward workers are closed")
            try:
                return await self._judge_at(place, frame, question.id)
            except _Died:
                # Whoever killed it need not have meant this answer: a fresh worker judges it, once.
                return await self._judge_at(place, frame, question.id)
        finally:
            self._free.put_nowait(place)

    async def close(self) -> None:
        """End all workers; judgements under way fail. Idempotent."""
        self._closed = True
        await asyncio.gather(*(place.worker.end() for place in self._places if place.worker is not None))

    async def _take(self) -> _Place:
        """A free place, in turn. Whoever is ahead holds one no longer than a start and a judgement may take."""
        longest = (self._waiting // len(self._places) + 2) * (self._timeout + self._start_timeout)
        self._waiting += 1
        try:
            async with asyncio.timeout(longest):
                return await self._free.get()
        except TimeoutError:
            raise ScoreError(f"no reward worker was free within {longest:g} s") from None
        finally:
            self._waiting -= 1

    async def _judge_at(self, place: _Place, frame: bytes, id: int) -> Judgement:
        try:
            worker = await self._fill(place)
        except (ConfigError, _Gone, TimeoutError) as error:
            raise ScoreError(f"a reward worker could not be started again: {self._refusal(error)}") from error
        settled = False
        try:
            async with asyncio.timeout(self._timeout):
                answer = await worker.ask(frame, Answer)
                # A function that forked has answered twice: answers to earlier questions are left out.
                while answer.id != id:
                    answer = await worker.receive(Answer)
            settled = True
        except TimeoutError:
            raise ScoreError(f"the reward function took more than {self._timeout:g} s") from None
        except _Gone as error:
            raise _Died(f"the reward worker {error} during a judgement") from None
        finally:
            # Also when this judgement was cancelled: the worker would answer it to the next question.
            if not settled:
                place.worker = None
                await asyncio.shield(worker.kill())
        if answer.judgement is None:
            raise ScoreError(answer.error)
        return answer.judgement

    async def _fill(self, place: _Place) -> _Worker:
        """The place's worker, started if it has none."""
        if place.worker is not None:
            return place.worker
        worker = await _Worker.spawn(self._directory, self._log)
        place.worker = worker
        ready = False
        try:
            if self._closed:
                raise _Gone("was closed")
            async with asyncio.timeout(self._start_timeout):
                hello = await worker.ask(pack(self._setup), Hello)
            if hello.error:
                raise ConfigError(hello.error)
            ready = True
        finally:
            if not ready:
                place.worker = None
                await asyncio.shield(worker.kill())
        return worker

    def _refusal(self, error: BaseException) -> ConfigError:
        """Why the reward function cannot be used, in one line."""
        name = f"{self._key} {self._setup.reference!r}" if self._key else "[task]"
        if isinstance(error, ConfigError):
            text = str(error)
            return ConfigError(text if text.startswith("[") else f"{name}: {text}")
        if isinstance(error, TimeoutError):
            return ConfigError(f"{name}: a reward worker was not ready after {self._start_timeout:g} s")
        if isinstance(error, _Gone):
            return ConfigError(f"{name}: the reward worker {error} while it started")
        raise error


class _Died(ScoreError):
    """A worker died during a judgement."""


class _Gone(Exception):
    """A worker's process ended; the text completes "the worker ..."."""


class _Place:
    """Room for one worker."""

    def __init__(self) -> None:
        self.worker: _Worker | None = None


class _Worker:
    """One process, its two pipes, and never more than one open question."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def spawn(cls, directory: Path, log: Path | None) -> _Worker:
        """Start a process that knows nothing yet, as the leader of a group of its own."""
        return cls(await pipes.spawn("headrace.scoring.worker_main", directory, log))

    async def ask(self, frame: bytes, kind: type[T]) -> T:
        """Send a frame and await the next one that comes back; raises `_Gone`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame)
            await self._process.stdin.drain()
        except ConnectionError:
            raise _Gone(f"died ({await pipes.how_it_ended(self._process)})") from None
        return await self.receive(kind)

    async def receive(self, kind: type[T]) -> T:
        """The next frame; raises `_Gone`."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            (length,) = HEADER.unpack(await stdout.readexactly(HEADER.size))
            return unpack(await stdout.readexactly(length), kind)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise _Gone(f"died ({await pipes.how_it_ended(self._process)})") from None
        except msgspec.DecodeError as error:
            raise _Gone(f"spoke nonsense ({error})") from error

    async def end(self) -> None:
        """Close its pipe, which ends it; kill it if that does not."""
        pipes.close_pipe(self._process)
        if not await pipes.ended(self._process):
            await self.kill()

    async def kill(self) -> None:
        """Kill it with all that it started, and wait until it is gone."""
        pipes.kill_group(self._process)
        pipes.close_pipe(self._process)
        await pipes.ended(self._process)

"""A pool of worker processes for foreign code. Code that hangs, raises or dies fails its own questions, never the run.

A worker receives one frame that says what it serves, greets, and then answers questions: one at a time, or several.
When a question is given up, by its deadline or by its caller, its worker gets no new questions. Once the worker's other
questions have ended, it is killed together with everything that it started, in whatever session. Workers that were
killed or died, or have grown in memory, are replaced when they are needed. A worker that has answered many questions
answers more until its successor is ready. The other end is `worker_side`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.channel.worker_side import (
    ANSWER_BYTES,
    GREETING,
    HEADER,
    MARK,
    WorkerReady,
    end_marked,
    owner_mark,
    pack,
)
from headrace.errors import ConfigError

T = TypeVar("T")

CLOSE_SECONDS = 5.0
GROWTH_BYTES = 1 << 30
"""A worker that holds this much more memory than after its first answer is replaced."""
LOOK_SECONDS = 0.1
"""Seconds between two looks at the memory of a worker."""


class WorkerDied(Exception):
    """The worker's process ended during a question. The text completes the sentence "the worker ..."."""


class PoolClosed(Exception):
    """The pool was closed before the question was answered."""


class WorkerPool:
    """A pool of `workers` processes of one kind, each with up to `concurrency` open questions."""

    def __init__(
        self,
        module: str,
        setup: msgspec.Struct,
        *,
        workers: int,
        concurrency: int = 1,
        start_timeout: float = 60.0,
        grace: float = 0.0,
        name: str = "worker",
        log: Path | None = None,
        recycle: int | None = None,
    ) -> None:
        """Make a pool without starting workers. `module` is their program, `setup` their first frame.

        `name` appears in error messages. A worker that is no longer needed has `grace` seconds to end by itself. What
        foreign code prints goes to `log`, or to this process's standard error. With `recycle`, a worker is replaced
        after so many answers, or when its memory has grown by `GROWTH_BYTES`.
        """
        self.places = asyncio.Semaphore(workers * concurrency)
        """A caller must hold one of these places while it asks. Places are granted in order."""
        self._module = module
        self._setup = msgspec.json.encode(setup)
        self._start_timeout = start_timeout
        self._grace = grace
        self._name = name
        self._log = log
        self._recycle = recycle
        self._failure: BaseException | None = None
        self._directory = Path.cwd()
        self._slots = [_Slot() for _ in range(workers)]
        self._running: set[_Worker] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """The tasks that end workers and start their successors."""
        self._ids = count(GREETING + 1)
        self._closed = False

    async def start(self) -> None:
        """Start every worker. If one cannot be started, end them all and raise `ConfigError` with one line."""
        results = await asyncio.gather(*map(self._fill, self._slots), return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.close()
            raise errors[0]

    async def ask(self, question: bytes, kind: type[T], timeout: float | None = None) -> T:
        """Return the answer to an encoded question. Cancelling this call gives the question up.

        The caller must hold one of the `places`. `timeout` counts from the moment the question is sent, and raises
        `TimeoutError`; without `timeout` the caller owns the wait. Raises `WorkerDied`, `PoolClosed`, and `ConfigError`
        if a worker cannot be started.
        """
        slot = min(self._slots, key=lambda slot: (slot.questions, not slot.filled))
        slot.questions += 1
        try:
            worker = await self._fill(slot)
            answer = await self._ask(worker, question, kind, timeout)
            if self._recycle is not None and worker.answered >= self._recycle:
                self._renew(slot, worker)
            return answer
        finally:
            slot.questions -= 1

    async def close(self) -> None:
        """End all workers. Open questions fail. Idempotent."""
        self._closed = True
        for worker in list(self._running):
            self._dismiss(worker, CLOSE_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4 * CLOSE_SECONDS):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    async def _ask(self, worker: _Worker, question: bytes, kind: type[T], timeout: float | None) -> T:
        id = next(self._ids)
        answered = False
        try:
            async with asyncio.timeout(timeout):
                answer = msgspec.json.decode(await worker.ask(id, question), type=kind)
            answered = True
            worker.answered += 1
            if self._recycle is not None and worker.has_grown():
                worker.able = False
            return answer
        except msgspec.DecodeError as error:
            raise WorkerDied(f"spoke nonsense ({error})") from error
        finally:
            if not answered:
                worker.give_up(id)
            if not worker.able and not worker.busy:
                self._dismiss(worker, CLOSE_SECONDS if answered else self._grace)

    async def _fill(self, slot: _Slot) -> _Worker:
        """Return the slot's worker. Start one if the slot has no worker that takes questions."""
        async with slot.turn:
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise PoolClosed
            if slot.worker is None or not slot.filled:
                slot.worker = await self._start()
            return slot.worker

    async def _start(self) -> _Worker:
        mark = f"{owner_mark()}.{id(self)}.{next(self._ids)}"
        worker = _Worker(await _spawn(self._module, self._directory, self._log, mark), mark)
        self._running.add(worker)
        ready = False
        try:
            if self._closed:
                raise PoolClosed
            async with asyncio.timeout(self._start_timeout):
                hello = msgspec.json.decode(await worker.ask(GREETING, self._setup), type=WorkerReady)
            if hello.error:
                raise ConfigError(hello.error)
            ready = True
        except TimeoutError:
            raise ConfigError(f"a {self._name} was not ready after {self._start_timeout:g} s") from None
        except WorkerDied as error:
            if self._closed:
                raise PoolClosed from error
            raise ConfigError(f"the {self._name} {error} while it started") from error
        finally:
            if not ready:
                self._dismiss(worker, 0.0)
        return worker

    def _renew(self, slot: _Slot, worker: _Worker) -> None:
        """Start the successor of a slot's worker, unless one is being started. The worker answers meanwhile."""
        if slot.worker is worker and not slot.renewing:
            slot.renewing = True
            self._own(asyncio.create_task(self._succeed(slot, worker), name=f"successor of a {self._name}"))

    async def _succeed(self, slot: _Slot, worker: _Worker) -> None:
        """Put a fresh worker in the place of this one. If none can be started, the next question finds out why."""
        successor = None
        with contextlib.suppress(ConfigError, PoolClosed):
            successor = await self._start()
        async with slot.turn:
            slot.renewing = False
            if successor is not None and slot.worker is worker:
                slot.worker = successor
            elif successor is not None:  # The worker has died meanwhile, and was replaced.
                self._dismiss(successor, 0.0)
            worker.able = False
            if not worker.busy:
                self._dismiss(worker, CLOSE_SECONDS)

    def _dismiss(self, worker: _Worker, grace: float) -> None:
        """Start to end a worker. `close` waits until the worker has ended. Idempotent."""
        if worker in self._running:
            self._running.remove(worker)
            self._own(asyncio.create_task(worker.end(grace), name=f"end of a {self._name}"))

    def _own(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error  # The next question raises it.


class _Slot:
    """A place for one worker that takes questions."""

    def __init__(self) -> None:
        self.worker: _Worker | None = None
        self.questions = 0
        """The number of open questions in this slot, including those of an old worker that takes no new questions."""
        self.turn = asyncio.Lock()
        self.renewing = False
        """Whether a successor of the worker is being started."""

    @property
    def filled(self) -> bool:
        return self.worker is not None and self.worker.able


class _Worker:
    """One worker process, its two pipes, and its open questions."""

    def __init__(self, process: Process, mark: str) -> None:
        self.able = True
        """Whether this worker takes questions."""
        self._process = process
        self._mark = mark
        self.answered = 0
        """The number of answers, without the greeting."""
        self._memory = 0
        """The bytes that the worker held after its first answer."""
        self._looked = 0.0
        self._grown = False
        self._open: dict[int, asyncio.Future[bytes | None]] = {}
        """Question id -> its future answer. None as an answer means that the worker is gone."""
        self._listener = asyncio.create_task(self._listen(), name="answers of a worker")

    @property
    def busy(self) -> bool:
        return bool(self._open)

    async def ask(self, id: int, question: bytes) -> bytes:
        """Send a question and return its answer. Raises `WorkerDied`. The caller owns this wait."""
        assert self._process.stdin is not None
        answer: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._open[id] = answer
        body = None
        try:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(pack(id, question))
                await self._process.stdin.drain()
                body = await answer
        finally:
            del self._open[id]
        if body is None:
            raise WorkerDied(f"died ({await self._how_it_ended()})")
        return body

    def has_grown(self) -> bool:
        """Return whether the worker has grown too much since its first answer. It looks ten times a second."""
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked, memory = now, _memory(self._process.pid)
            self._memory = self._memory or memory
            self._grown = memory > self._memory + GROWTH_BYTES
        return self._grown

    def give_up(self, id: int) -> None:
        """Tell the worker that nobody waits for this answer any more. The worker then takes no new questions."""
        assert self._process.stdin is not None
        self.able = False
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(pack(id, b""))

    async def end(self, grace: float) -> None:
        """Close the worker's pipe, which ends a well-behaved worker, then kill it and everything that it started."""
        assert self._process.stdin is not None
        self.able = False
        self._process.stdin.close()
        if grace:
            await self._ended(grace)
        # The group outlives its leader if the leader left processes behind. The kernel does not reuse the id of such a
        # group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(end_marked, self._mark)
        await self._ended(CLOSE_SECONDS)
        self._listener.cancel()
        await asyncio.wait([self._listener], timeout=CLOSE_SECONDS)

    async def _ended(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()

    async def _how_it_ended(self) -> str:
        await self._ended(CLOSE_SECONDS)
        code = self._process.returncode
        if code is None:
            return "its pipe closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def _listen(self) -> None:
        """Pass answers on. Answers that nobody waits for, such as a second one from code that forked, are ignored."""
        assert self._process.stdout is not None
        try:
            while (frame := await receive(self._process.stdout)) is not None:
                id, body = frame
                if id in self._open and not self._open[id].done():
                    self._open[id].set_result(body)
        finally:
            self.able = False
            for answer in self._open.values():
                if not answer.done():
                    answer.set_result(None)


async def receive(stream: asyncio.StreamReader) -> tuple[int, bytes] | None:
    """Wait for the next frame: its id and body, or None at the end of the stream. The caller owns this wait.

    A frame that is longer than any worker sends ends the stream too.
    """
    try:
        id, length = HEADER.unpack(await stream.readexactly(HEADER.size))
        return None if length > ANSWER_BYTES else (id, await stream.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def _memory(pid: int) -> int:
    """Return the bytes of memory that a process holds; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


async def _spawn(module: str, directory: Path, log: Path | None, mark: str) -> Process:
    """Start a module in this directory. It leads a process group, which is killed as a whole."""
    with contextlib.ExitStack() as stack:
        errors = None if log is None else stack.enter_context(log.open("ab"))
        return await asyncio.create_subprocess_exec(
            # -P: files in the user's directory must not hide the modules that the worker needs.
            *(sys.executable, "-P", "-m", module),
            stdin=PIPE,
            stdout=PIPE,
            stderr=errors,
            cwd=directory,
            start_new_session=True,
            env={**os.environ, MARK: mark},
        )

"""Serves any asyncio `Engine` as an `EngineServer`: an event loop in the main thread, with one task for each call.

    submit ─▶ a task per request: engine.generate ─▶ outbox ─(10 ms)─▶ emit
    fork, load, score ─▶ a task each ─▶ its future

vLLM servers and engines of users are served in this way. If the engine loses something that it depends on, `run` raises
`PeerDied` after it has emitted the tokens that were drawn. Open requests and futures then get no further answer,
because the requests are resumed on other engines.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Engine, Request, closing_deltas, failed_delta
from headrace.engines.serving import Emit
from headrace.errors import HeadraceError, PeerDied
from headrace.types import Float32Array, Int32Array

T = TypeVar("T")

FLUSH_SECONDS = 0.01
"""Deltas that arrive within this time are emitted together."""
WATCH_SECONDS = 1.0
"""The time between two checks whether the engine is lost."""
CLOSE_SECONDS = 10.0
"""How long open requests and calls may take to end after the engine was closed; then they are cancelled."""


@dataclass(frozen=True)
class Opened:
    """An engine that is ready to serve."""

    engine: Engine
    check: Callable[[], Awaitable[None]] | None = None
    """Raises `PeerDied` if something that the engine depends on, such as a server process, is lost.

    A failure is reported to the caller only after a check that found nothing lost.
    """


class EventLoopServer:
    """An `EngineServer` that runs an asyncio `Engine`."""

    def __init__(self, name: str, open_engine: Callable[[], AbstractAsyncContextManager[Opened]], emit: Emit) -> None:
        """Prepare a server. `open_engine` is entered inside the event loop, and left after the engine was closed."""
        self._name = name
        self._open = open_engine
        self._emit = emit
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._early: list[Callable[[], None]] = []
        """Commands that were posted before the engine was open."""
        self._ended = False
        self._gone = f"engine {name} has stopped"
        self._lost = False
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._futures: set[Future[Any]] = set()
        self._outbox: list[Delta] = []

    def submit(self, requests: Sequence[Request]) -> None:
        """See `EngineServer.submit`."""
        requests = list(requests)
        if not self._post(lambda: self._begin(requests)) and not self._lost:
            self._emit([failed_delta(request.id, self._gone) for request in requests])

    def abort(self, ids: Sequence[str] | None = None) -> Future[None]:
        """See `EngineServer.abort`."""
        return self._ask(lambda engine: engine.abort(ids))

    def fork(self, request_id: str, at: int, n: int) -> Future[list[Request]]:
        """See `EngineServer.fork`."""
        return self._ask(lambda engine: engine.fork(request_id, at, n))

    def load(self, manifest: Manifest) -> Future[Proof]:
        """See `EngineServer.load`."""
        return self._ask(lambda engine: engine.load(manifest))

    def score(self, token_ids: Int32Array) -> Future[Float32Array]:
        """See `EngineServer.score`."""
        return self._ask(lambda engine: engine.score(token_ids))

    def run(self) -> None:
        """See `EngineServer.run`. An error of a task that is not a `HeadraceError` also ends `run`, and is raised."""
        asyncio.run(self._serve())

    def stop(self) -> None:
        """See `EngineServer.stop`."""
        self._post(self._stopping.set)

    async def _serve(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._open() as opened:
            self._engine, self._check_engine = opened.engine, opened.check
            with self._lock:
                self._loop = asyncio.get_running_loop()
                early, self._early = self._early, []
            try:
                for command in early:
                    command()
                await self._until_stopped()
            except PeerDied:
                self._lost = True
                raise
            except BaseException as error:
                self._gone = f"engine {self._name} died of {type(error).__name__}: {error}"
                raise
            finally:
                await self._end()

    async def _until_stopped(self) -> None:
        """Return when told to stop. Raise the error of a task, and `PeerDied` as soon as the engine is lost."""
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._stopping.wait()), self._failure]
        if self._check_engine is not None:
            ends.append(asyncio.ensure_future(self._watch(self._check_engine)))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            for end in ends:
                end.cancel()

    async def _end(self) -> None:
        with self._lock:
            self._ended = True
        await asyncio.sleep(0)  # Commands that were posted before are run first.
        await self._engine.close()
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._flush()
        for future in () if self._lost else list(self._futures):
            if future.set_running_or_notify_cancel():
                future.set_exception(HeadraceError(self._gone))

    def _post(self, command: Callable[[], None]) -> bool:
        """Run a command in the event loop. Return False if the event loop has ended."""
        with self._lock:
            if self._ended:
                return False
            if self._loop is None:
                self._early.append(command)
            else:
                self._loop.call_soon_threadsafe(command)
            return True

    def _ask(self, question: Callable[[Engine], Awaitable[T]]) -> Future[T]:
        future: Future[T] = Future()
        if not self._post(lambda: self._spawn(self._answer(future, question))) and not self._lost:
            future.set_exception(HeadraceError(self._gone))
        return future

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _answer(self, future: Future[T], question: Callable[[Engine], Awaitable[T]]) -> None:
        """Settle the future. If the engine is lost, leave the future open: this process ends instead."""
        self._futures.add(future)
        failure: HeadraceError | None = None
        try:
            result = await question(self._engine)
        except PeerDied:
            raise
        except HeadraceError as error:
            failure = error
        if failure is not None or (isinstance(result, Proof) and not result.accepted):
            await self._check()
        self._futures.discard(future)
        if self._lost or not future.set_running_or_notify_cancel():
            return
        if failure is not None:
            future.set_exception(failure)
        else:
            future.set_result(result)

    def _begin(self, requests: list[Request]) -> None:
        for request in requests:
            self._spawn(self._read(request))

    async def _read(self, request: Request) -> None:
        """Hand out the deltas of a request. Exactly one of them is the last delta."""
        last = failed_delta(request.id, f"engine {self._name} gave request {request.id} no last delta")
        try:
            async with closing_deltas(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    if delta.finish is not None:
                        last = delta
                        break
                    self._hand_out(delta)
        except PeerDied:
            raise
        except HeadraceError as error:
            last = failed_delta(request.id, f"{type(error).__name__}: {error}")
        if last.finish == "failed":
            await self._check()
        self._hand_out(last)

    async def _check(self) -> None:
        """Raise `PeerDied` if the engine is lost, because a failure may have that cause."""
        if self._check_engine is not None and not self._ended:
            await self._check_engine()

    async def _watch(self, check: Callable[[], Awaitable[None]]) -> None:
        """Check repeatedly. Raise `PeerDied` when the engine is lost."""
        while True:
            await check()
            await asyncio.sleep(WATCH_SECONDS)

    def _hand_out(self, delta: Delta) -> None:
        if self._lost and delta.finish in ("failed", "aborted"):
            delta = msgspec.structs.replace(delta, finish=None, error="")
            if not len(delta.token_ids):
                return
        self._outbox.append(delta)
        if len(self._outbox) == 1:
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        deltas, self._outbox = self._outbox, []
        if deltas:
            self._emit(deltas)

"""Serves any asyncio `Engine` in a worker process: an event loop, with one task for each message of the controller.

    Submit ─▶ a task per request: engine.generate ─▶ outbox ─(10 ms)─▶ the controller
    Fork, Load, ScoreTokens ─▶ a task each ─▶ its reply

vLLM servers and engines of users are served in this way. If the engine loses something that it depends on, `run` raises
`PeerDied` after it has sent the tokens that were drawn. Open requests and questions then get no further answer, because
the requests are resumed on other engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.channel.heartbeats import Stop
from headrace.channel.worker_link import Incoming, WorkerLink
from headrace.delivery.base import Proof
from headrace.engines.base import Delta, Engine, Request, closing_deltas, failed_delta
from headrace.engines.serving import Submit, begin, send_deltas
from headrace.errors import HeadraceError, PeerDied

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
    """Runs an asyncio `Engine` and answers the controller's messages to it."""

    def __init__(self, link: WorkerLink, open_engine: Callable[[], AbstractAsyncContextManager[Opened]]) -> None:
        """Prepare a server. `open_engine` is entered inside the event loop, and left after the engine was closed."""
        self._link = link
        self._open = open_engine
        self._ended = False
        self._gone = f"engine {link.name} has stopped"
        self._lost = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._unanswered: dict[int, Incoming] = {}
        self._outbox: list[Delta] = []

    def run(self) -> None:
        """Serve until the controller sends `Stop`. Every open request then has received its last delta.

        Raises `PeerDied` if the engine is lost, and any error of a task that is not a `HeadraceError`.
        """
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with self._open() as opened:
            self._engine, self._check_engine = opened.engine, opened.check
            try:
                await self._until_stopped()
            except PeerDied:
                self._lost = True
                raise
            except BaseException as error:
                self._gone = f"engine {self._link.name} died of {type(error).__name__}: {error}"
                raise
            finally:
                await self._end()

    async def _until_stopped(self) -> None:
        """Return when told to stop. Raise the error of a task, and `PeerDied` as soon as the engine is lost."""
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._obey()), self._failure]
        if self._check_engine is not None:
            ends.append(asyncio.ensure_future(self._watch(self._check_engine)))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                end.result()
        finally:
            for end in ends:
                end.cancel()

    async def _obey(self) -> None:
        """Begin what the controller's messages ask for, until the message is `Stop`."""
        while True:
            incoming = await asyncio.to_thread(self._link.next_message)
            if incoming is None:
                continue
            match incoming.message:
                case Submit(requests=requests):
                    for request in requests:
                        self._spawn(self._read(request))
                case Stop():
                    self._link.phase = "stopping"
                    return
                case _:
                    self._spawn(self._answer(incoming))

    async def _end(self) -> None:
        self._ended = True
        await asyncio.sleep(0)  # Tasks that have just been made begin first.
        await self._engine.close()
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._flush()
        for incoming in () if self._lost else self._unanswered.values():
            self._link.fail(incoming, f"HeadraceError: {self._gone}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def _answer(self, incoming: Incoming) -> None:
        """Do what a message asks for, and answer it. If the engine is lost, this process ends without an answer."""
        self._unanswered[incoming.request_id] = incoming
        failure: HeadraceError | None = None
        try:
            pending, wrap = begin(incoming.message, self._engine)
            result = await pending
        except PeerDied:
            raise
        except HeadraceError as error:
            failure = error
        if failure is not None or (isinstance(result, Proof) and not result.accepted):
            await self._check()
        self._unanswered.pop(incoming.request_id, None)
        if self._lost:
            return
        if failure is not None:
            self._link.fail(incoming, f"{type(failure).__name__}: {failure}")
        elif wrap is not None:
            self._link.reply(incoming, wrap(result))

    async def _read(self, request: Request) -> None:
        """Hand out the deltas of a request. Exactly one of them is the last delta."""
        last = failed_delta(request.id, f"engine {self._link.name} gave request {request.id} no last delta")
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
            send_deltas(self._link, deltas)

"""The embedded engine inside this process: an `EngineLoop` in a thread, its deltas handed to the event loop.

Requests made in one turn of the event loop enter the engine between the same two steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, EngineStats, Request, failed_delta
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.loop import EngineLoop
from headrace.errors import DeadlineError, HeadraceError
from headrace.models.loading import load_model
from headrace.models.selfcheck import check_model
from headrace.types import NO_VERSION, Float32Array, Int32Array

T = TypeVar("T")

_LOOK_SECONDS = 1.0
"""How often a waiting request checks that the engine's thread still lives."""


class EmbeddedEngine:
    """Implements `Engine`. Made inside a running event loop, and used from that one only."""

    def __init__(self, core: EngineCore, config: EngineConfig, *, deadline: float = 120.0) -> None:
        self.name = core.name
        self._deadline = deadline
        self._events = asyncio.get_running_loop()
        self._streams: dict[str, asyncio.Queue[Delta]] = {}
        self._outbox: list[Request] = []
        self._loop = EngineLoop(core, self._emit, config.interrupt)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=core.name, daemon=True)
        self._thread.start()

    @classmethod
    def from_path(
        cls,
        path: str | Path,
        config: EngineConfig,
        *,
        max_length: int,
        name: str = "engine",
        weights: str = "load",
        dtype: str = "float32",
        seed: int = 0,
        version: int = NO_VERSION,
    ) -> EmbeddedEngine:
        """Serve the model in this directory, after its self-check. With `version = 0` it serves its own weights."""
        model = load_model(path, weights=weights, dtype=dtype, seed=seed)
        check_model(model, max_length)
        return cls(EngineCore(model, config, name=name, max_length=max_length, version=version), config)

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """See `Engine.generate`."""
        if request.id in self._streams:
            yield failed_delta(request.id, f"a request with id {request.id!r} is already running")
            return
        stream = self._streams[request.id] = asyncio.Queue()
        finished = False
        try:
            self._post(request)
            while not finished:
                delta = await self._next(request.id, stream)
                finished = delta.finish is not None
                yield delta
        finally:
            del self._streams[request.id]
            if not finished:
                self._withdraw(request.id)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        self._flush_outbox()
        await self._settled(self._loop.abort(ids), "an abort")

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._settled(self._loop.pause(), "a pause")

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._settled(self._loop.resume(), "a resume")

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        return await self._settled(self._loop.load(manifest), f"version {manifest.version}")

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return await self._settled(self._loop.score(token_ids), "a score")

    async def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._loop.stats()

    async def close(self) -> None:
        """See `Engine.close`."""
        self._flush_outbox()
        self._loop.stop()
        await asyncio.to_thread(self._thread.join, self._deadline)
        if self._thread.is_alive():
            raise DeadlineError(f"engine {self.name} did not end its step in {self._deadline:g} s")

    def _serve(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self._error = error
            raise

    def _emit(self, deltas: list[Delta]) -> None:
        # Once the event loop is closed nobody listens.
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(self._deliver, deltas)

    def _deliver(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if stream := self._streams.get(delta.id):
                stream.put_nowait(delta)

    async def _next(self, request_id: str, stream: asyncio.Queue[Delta]) -> Delta:
        """The request's next delta. It may wait for long (a paused or unproved engine), but not for a dead thread."""
        while True:
            alive = self._thread.is_alive()
            try:
                async with asyncio.timeout(_LOOK_SECONDS):
                    return await stream.get()
            except TimeoutError:
                if not alive:
                    raise HeadraceError(f"engine {self.name} is gone; request {request_id} has no end") from self._error

    async def _settled(self, future: Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._deadline):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise DeadlineError(f"engine {self.name} did not answer {what} in {self._deadline:g} s") from error

    def _post(self, request: Request) -> None:
        self._outbox.append(request)
        if len(self._outbox) == 1:
            self._events.call_soon(self._flush_outbox)

    def _withdraw(self, request_id: str) -> None:
        self._outbox = [request for request in self._outbox if request.id != request_id]
        self._loop.abort([request_id])

    def _flush_outbox(self) -> None:
        requests, self._outbox = self._outbox, []
        if requests:
            self._loop.submit(requests)

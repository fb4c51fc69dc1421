"""The embedded engine inside this process, without a worker process of its own.

An `EngineLoop` runs in a thread of its own and hands its deltas to the asyncio event loop. Requests that are made in
one turn of the event loop enter the engine between the same two steps. When the thread ends, for whatever reason, every
open request gets its last delta.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Counters, Request
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.loop import EngineLoop
from headrace.engines.embedded.setup import choose_device
from headrace.engines.streams import StreamedEngine
from headrace.errors import DeadlineError
from headrace.models.loading import load_model
from headrace.models.selfcheck import check_model
from headrace.types import NO_VERSION, Float32Array, Int32Array

T = TypeVar("T")


class EmbeddedEngine(StreamedEngine):
    """An `Engine` in this process. It must be made inside a running event loop, and used from that event loop only."""

    def __init__(self, core: EngineCore, config: EngineConfig, *, deadline: float = 120.0) -> None:
        """Start the thread of the engine. `deadline` limits every wait for the thread, in seconds.

        The deltas of a request have no deadline.
        """
        # An engine without proved weights may be silent for any time, so a delta has no deadline.
        super().__init__(core.name)
        self._deadline = deadline
        self._events = asyncio.get_running_loop()
        self._loop = EngineLoop(core, lambda deltas: self._hand_over(self.deliver, deltas), config.interrupt)
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
        """Load the model in this directory, check it, and return an engine for it.

        With `version = 0`, the engine serves the weights of the directory as version 0. By default it samples nothing
        until weights come by `load`.
        """
        model = load_model(path, weights=weights, dtype=dtype, seed=seed, device=choose_device(config.device))
        check_model(model, max_length)
        return cls(EngineCore(model, config, name=name, max_length=max_length, version=version), config)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        self.flush()
        await self._settled(self._loop.abort(ids), "an abort")

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        return await self._settled(self._loop.load(manifest), f"version {manifest.version}")

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return await self._settled(self._loop.score(token_ids), "a score")

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """See `Engine.fork`."""
        self.flush()
        return await self._settled(self._loop.fork(request_id, at, n), "a fork")

    def counters(self) -> Counters:
        """Return the counters and the occupancy of the engine, at some moment near the call."""
        return self._loop.counters()

    async def close(self) -> None:
        """See `Engine.close`."""
        self.flush()
        self._loop.stop()
        await asyncio.to_thread(self._thread.join, self._deadline)
        if self._thread.is_alive():
            raise DeadlineError(f"engine {self.name} did not end its step in {self._deadline:g} s")

    def _submit(self, requests: list[Request]) -> None:
        self._loop.submit(requests)

    def _withdraw(self, request_id: str) -> None:
        self._loop.abort([request_id])

    def _serve(self) -> None:
        reason = f"engine {self.name} has stopped"
        try:
            self._loop.run()
        except BaseException as error:
            reason = f"engine {self.name} died of {type(error).__name__}: {error}"
            raise
        finally:
            self._hand_over(self.lost, reason)

    def _hand_over(self, take: Callable[[T], None], what: T) -> None:
        # When the event loop is closed, nobody reads the deltas.
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(take, what)

    async def _settled(self, future: Future[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._deadline):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise DeadlineError(f"engine {self.name} did not answer {what} in {self._deadline:g} s") from error

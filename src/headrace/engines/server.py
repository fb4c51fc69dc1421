"""An engine as its worker process drives it, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from headrace.channel.worker_link import WorkerLink
from headrace.config import Config
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Request
from headrace.types import Float32Array, Int32Array

Emit = Callable[[list[Delta]], None]
"""Takes new deltas of any number of requests, from the thread that calls `EngineServer.run`."""


class EngineServer(Protocol):
    """Serves one engine in the thread that calls `run`. All other methods may be called from any thread.

    None of them waits. A future fails with the reason if what was asked for cannot be done. If the engine is lost with
    something that it depends on, `run` raises `PeerDied`, and open requests and futures get no answer: whoever watches
    over the process starts it again, and its requests go on elsewhere.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; all of one call enter the engine together, in this order."""
        ...

    def abort(self, ids: Sequence[str] | None = None) -> object:
        """End these requests (all, if None)."""
        ...

    def fork(self, request_id: str, at: int, n: int) -> Future[list[Request]]:
        """See `Engine.fork`."""
        ...

    def load(self, manifest: Manifest) -> Future[Proof]:
        """See `Engine.load`."""
        ...

    def score(self, token_ids: Int32Array) -> Future[Float32Array]:
        """See `Engine.score`."""
        ...

    def run(self) -> None:
        """Serve until stopped. When this returns, every open request has got its last delta."""
        ...

    def stop(self) -> None:
        """End `run` soon. Idempotent."""
        ...


Build = Callable[[WorkerLink, Config, Emit], EngineServer]
"""Builds the engine of a worker process. It reports its phases to the link, and calls `ready` there when it serves."""

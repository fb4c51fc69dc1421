"""The protocol through which a worker process drives its engine. It is the same for every kind of engine."""

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
"""Takes new deltas of any number of requests. It is called from the thread that calls `EngineServer.run`."""


class EngineServer(Protocol):
    """A server of one engine. It runs in the thread that calls `run`; other methods may be called from any thread.

    The other methods do not block. A future fails with the reason if the call cannot be carried out. If the engine
    depends on something outside of this process and that is lost, `run` raises `PeerDied`, and open requests and
    futures get no answer. The supervisor then restarts the process, and the requests are resumed on other engines.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. All requests of one call enter the engine together, in this order."""
        ...

    def abort(self, ids: Sequence[str] | None = None) -> object:
        """End these requests (all requests if None)."""
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
        """Serve until stopped. When `run` returns, every open request has received its last delta."""
        ...

    def stop(self) -> None:
        """Make `run` return soon. Idempotent."""
        ...


Build = Callable[[WorkerLink, Config, Emit], EngineServer]
"""Builds the engine of a worker process. The builder reports its phases to the link, and calls `WorkerLink.ready` when
the engine can serve."""

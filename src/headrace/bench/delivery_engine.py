"""The process of an engine in a delivery benchmark. It holds a model, and fetches, swaps and proves each version.

By default nothing runs beside the deliveries, and the canary is scored last and timed by itself. With `decode`, a real
engine decodes all the time, and the swap is measured as the time by which it delays the steps.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import torch

from headrace.bench.delivery_messages import BenchEngine, Enter, Entered, Take, Taken
from headrace.bench.delivery_sets import load, served_adapter
from headrace.bench.engine_rescore import plain_twin, row_logprobs
from headrace.bench.side import Connection
from headrace.delivery.base import Manifest
from headrace.delivery.receiver import Receiver, Staged
from headrace.engines.base import Sampling
from headrace.engines.embedded.setup import give_way_to_decoding
from headrace.errors import DeliveryError, HeadraceError
from headrace.models.loading import named_weights
from headrace.types import Float32Array

IDLE_SECONDS = 3600.0
_PROOF_SECONDS = 120.0
_POLL_SECONDS = 0.0001


class HoldingEngine:
    """A `BenchEngine` that only holds the weights of a model. The plain model scores the canary."""

    def __init__(self, enter: Enter) -> None:
        model = load(enter.model, enter.dtype, enter.device, enter.seed)
        adapter, base = served_adapter(model) if enter.adapter else (None, None)
        self._receiver = Receiver(
            adapter.weights() if adapter else named_weights(model),
            enter.name,
            installed=adapter.apply if adapter else None,
            base_digest=base,
        )
        self._twin: Any = plain_twin(model)

    def stage(self, manifest: Manifest) -> Staged:
        """See `BenchEngine.stage`."""
        return self._receiver.stage(manifest)

    def take(self, staged: Staged) -> Taken:
        """See `BenchEngine.take`."""
        manifest, began = staged.manifest, time.monotonic()
        with torch.no_grad():
            installed = self._receiver.install(staged)
        while not installed.ready():
            if time.monotonic() - began > _PROOF_SECONDS:
                raise DeliveryError(f"version {manifest.version} was not digested within {_PROOF_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
        proved_at = time.monotonic()
        logprobs = self._score(manifest)
        canary = time.monotonic() - proved_at
        proof = self._receiver.prove(installed, logprobs)
        return Taken(
            proof=proof,
            fetch_seconds=staged.fetch_seconds,
            stage_seconds=staged.seconds,
            swap_seconds=proved_at - began,
            canary_seconds=canary,
            proved_at=proved_at,
        )

    def turn(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """See `BenchEngine.close`."""
        self._receiver.close()

    def _score(self, manifest: Manifest) -> Float32Array:
        tokens = manifest.canary.token_ids
        return row_logprobs(self._twin, tokens[:1], tokens[1:], Sampling(max_tokens=1))


def make_engine(enter: Enter) -> BenchEngine:
    """Return the engine that the first message asks for."""
    if not enter.decode:
        return HoldingEngine(enter)
    # Imported only here, because a decoding engine loads many more modules than the weights alone need.
    from headrace.bench.delivery_decode import DecodingEngine

    return DecodingEngine(enter)


class Orders:
    """Receives versions in a thread of its own and stages each at once. The engine takes them between two steps."""

    def __init__(self, line: Connection, engine: BenchEngine) -> None:
        self._line = line
        self._engine = engine
        self._staged: queue.SimpleQueue[tuple[Staged, float, float] | BaseException] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="orders", daemon=True).start()

    def waiting(self) -> bool:
        """Return whether a staged version is there, so that `next` does not wait."""
        return not self._staged.empty()

    def next(self) -> tuple[Staged, float, float]:
        """Return the next staged version, when it was received, and when it was staged.

        Raises `EOFError` once the connection is closed.
        """
        got = self._staged.get(timeout=IDLE_SECONDS)
        if isinstance(got, BaseException):
            raise got
        return got

    def _receive(self) -> None:
        try:
            while True:
                manifest = self._line.receive(Take, IDLE_SECONDS).manifest
                received = time.monotonic()
                self._staged.put((self._engine.stage(manifest), received, time.monotonic()))
        except (EOFError, OSError, HeadraceError, RuntimeError) as error:
            # `next` raises it in the thread that drives the engine. Here it would be lost with this thread.
            self._staged.put(error)


def serve(line: Connection) -> None:
    """Make the engine, and take versions until the connection is closed."""
    enter = line.receive(Enter, IDLE_SECONDS)
    torch.set_num_threads(enter.threads)
    engine = make_engine(enter)
    # The process of a real engine does the same, once everything is loaded.
    give_way_to_decoding()
    line.send(Entered())
    orders = Orders(line, engine)
    try:
        while True:
            while enter.decode and not orders.waiting():
                engine.turn()
            staged, received_at, staged_at = orders.next()
            taken = engine.take(staged)
            taken.received_at, taken.staged_at = received_at, staged_at
            line.send(taken)
    except EOFError:
        return
    finally:
        engine.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

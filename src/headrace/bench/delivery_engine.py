"""An engine's place in a delivery benchmark: a process with a model, which fetches, swaps and proves what it is told.

The canary is scored after everything else and timed by itself. With `decode`, a real engine decodes all the while, and
what a delivery takes from it is measured where it is felt: between two steps.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

import msgspec
import torch

from headrace.bench.delivery_sets import load, served_adapter
from headrace.bench.engine_rescore import plain_twin, row_logprobs
from headrace.bench.side import Line
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Receiver
from headrace.engines.base import Sampling
from headrace.errors import DeliveryError
from headrace.models.loading import named_weights
from headrace.types import Float32Array

IDLE_SECONDS = 3600.0
_PROOF_SECONDS = 120.0
_POLL_SECONDS = 0.0001


class Enter(msgspec.Struct, kw_only=True):
    """The first message: which model to hold, and how."""

    name: str
    model: str
    dtype: str
    device: str
    seed: int
    threads: int
    adapter: bool
    decode: int


class Entered(msgspec.Struct, kw_only=True):
    """The model is there."""

    step_seconds: float = 0.0
    """Of a decode step without any delivery."""


class Take(msgspec.Struct, kw_only=True):
    """Make this version the live one."""

    manifest: Manifest


class Taken(msgspec.Struct, kw_only=True):
    """It is, and what it took. Moments are of the monotonic clock that the processes of a host share."""

    proof: Proof
    fetch_seconds: float
    stage_seconds: float
    """Fetching included."""
    swap_seconds: float
    """The copy over the live weights and their digest; of a decoding engine all that its steps waited for."""
    canary_seconds: float
    """0 where it ran beside decoding."""
    proved_at: float
    """Without the canary, where that was scored apart."""
    first_token_at: float = 0.0
    """When the host first knew a token of the new version."""


class Engine(Protocol):
    """What a process of the benchmark does with manifests."""

    step_seconds: float

    def take(self, manifest: Manifest) -> Taken:
        """Fetch, swap and prove."""
        ...

    def turn(self) -> None:
        """What is done while nothing arrives."""
        ...

    def close(self) -> None:
        """Let go of what deliveries hold."""
        ...


class HoldingEngine:
    """The weights of a model, and a canary that the plain model scores."""

    step_seconds = 0.0

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

    def take(self, manifest: Manifest) -> Taken:
        """See `Engine.take`."""
        staged = self._receiver.stage(manifest)
        began = time.monotonic()
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
        """Nothing runs here meanwhile."""
        time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """See `Engine.close`."""
        self._receiver.close()

    def _score(self, manifest: Manifest) -> Float32Array:
        tokens = manifest.canary.token_ids
        return row_logprobs(self._twin, tokens[:1], tokens[1:], Sampling(max_tokens=1))


def make_engine(enter: Enter) -> Engine:
    """The engine that was asked for."""
    if not enter.decode:
        return HoldingEngine(enter)
    # Late: an engine loads more than weights need.
    from headrace.bench.delivery_decode import DecodingEngine

    return DecodingEngine(enter)


def serve(line: Line) -> None:
    """Obey until the line closes."""
    enter = line.receive(Enter, IDLE_SECONDS)
    torch.set_num_threads(enter.threads)
    engine = make_engine(enter)
    line.send(Entered(step_seconds=engine.step_seconds))
    try:
        while True:
            while enter.decode and not line.waiting():
                engine.turn()
            line.send(engine.take(line.receive(Take, IDLE_SECONDS).manifest))
    except EOFError:
        return
    finally:
        engine.close()


if __name__ == "__main__":
    serve(Line(int(sys.argv[1])))

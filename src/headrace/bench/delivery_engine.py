"""The process of an engine in a delivery benchmark. It holds a model, and fetches, swaps and proves each version.

By default nothing runs beside the deliveries, and the canary is scored last and timed by itself. With `decode`, a real
engine decodes all the time: staging runs beside its steps, and the swap is measured as the time by which it delays the
steps. A sequence that ends is replaced by a new one. So the batch is always full, and no delivery is measured on an
idle engine.
"""

from __future__ import annotations

import sys
import threading
import time

import msgspec
import numpy as np
import torch

from headrace.bench.base import vocabulary_of
from headrace.bench.delivery_sides import Begin, Connection, Ready, load_served
from headrace.bench.engine_checks import plain_twin, score_canary
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Receiver, Staged
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.engine import EngineLoop
from headrace.engines.embedded.setup import give_way_to_decoding
from headrace.errors import DeliveryError, HeadraceError
from headrace.models.loading import named_weights

PROMPT = 16
LONGEST = 512
"""The length of a sequence in tokens, including its prompt."""
PROOF_SECONDS = 300.0
_POLL_SECONDS = 0.0001
_WARM_TOKENS = 32
"""How many tokens each sequence has before the first delivery, so that kernels are loaded and graphs captured."""


class Taken(msgspec.Struct, kw_only=True):
    """The answer to a manifest: whether the version was proved, and how long each part took.

    Fields that end in `_at` are times of the monotonic clock, which all processes of a host share.
    """

    refused: str = ""
    """Why the version was not accepted; empty if it was."""
    fetch_seconds: float = 0.0
    stage_seconds: float = 0.0
    """The time to fetch and check the version. It includes `fetch_seconds`."""
    swap_seconds: float = 0.0
    """The time of the copy over the live weights and of their digest. For a decoding engine: the time by which the swap
    delayed its steps."""
    proved_at: float = 0.0
    """When the version was proved. For an engine that only holds weights, the canary is not included."""
    canary_seconds: float = 0.0
    """The time to score the canary; 0 for a decoding engine, which scores it beside its steps."""
    received_at: float = 0.0
    """When the engine's process received the manifest."""
    staged_at: float = 0.0
    install_began_at: float = 0.0
    installed_at: float = 0.0
    """When the copy was launched. It runs after the steps that were launched before it."""
    last_token_at: float = 0.0
    """When the host got the last token of the old version; at least `installed_at`."""
    first_token_at: float = 0.0
    """When the host got the first token of the new version."""
    step_seconds: float = 0.0
    """The mean time of a decode step since the delivery before."""


def hold(line: Connection, begin: Begin) -> None:
    """Take versions as an engine that only holds the weights of a model. The plain model scores the canary."""
    model, adapter, base = load_served(begin)
    weights = adapter.weights() if adapter else named_weights(model)
    receiver = Receiver(weights, begin.name, installed=adapter.apply if adapter else None, base_digest=base)
    twin = plain_twin(model)
    line.send(Ready())
    try:
        while True:
            staged = receiver.stage(line.receive(Manifest))
            began = time.monotonic()
            with torch.no_grad():
                installed = receiver.install(staged)
            while not installed.ready():
                _check_time(staged.manifest, began)
                time.sleep(_POLL_SECONDS)
            proved_at = time.monotonic()
            logprobs = score_canary(twin, staged.manifest.canary.token_ids)
            canary = time.monotonic() - proved_at
            line.send(
                Taken(
                    refused=receiver.prove(installed, logprobs).reason,
                    fetch_seconds=staged.fetch_seconds,
                    stage_seconds=staged.seconds,
                    swap_seconds=proved_at - began,
                    proved_at=proved_at,
                    canary_seconds=canary,
                )
            )
    finally:
        receiver.close()


class TimedCore(EngineCore):
    """An engine core that notes in `taken` when each part of the last delivery happened."""

    taken = Taken()

    def stage(self, manifest: Manifest) -> Staged:
        """See `EngineCore.stage`."""
        self.taken = Taken()
        staged = super().stage(manifest)
        self.taken.fetch_seconds, self.taken.stage_seconds = staged.fetch_seconds, staged.seconds
        self.taken.staged_at = time.monotonic()
        return staged

    def install(self, staged: Staged) -> None:
        """See `EngineCore.install`."""
        timings = self.timings
        self.taken.step_seconds = (timings.device_seconds or timings.host_seconds) / max(1, timings.steps)
        timings.reset()
        self.taken.install_began_at = time.monotonic()
        super().install(staged)
        self.taken.installed_at = self.taken.last_token_at = time.monotonic()

    def step(self) -> list[Delta]:
        """See `EngineCore.step`."""
        known = self._generated
        deltas = super().step()
        if self._generated > known and self.drawn_version < self._live:
            self.taken.last_token_at = time.monotonic()
        return deltas

    def proof(self, *, wait: bool) -> Proof | None:
        """See `EngineCore.proof`."""
        if (proof := super().proof(wait=wait)) is not None:
            self.taken.proved_at = time.monotonic()
        return proof


class DecodingEngine:
    """An engine that decodes a full batch all the time, driven by the loop that drives an engine in a run."""

    def __init__(self, begin: Begin) -> None:
        model, adapter, base = load_served(begin)
        rows = begin.options.decode
        positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", LONGEST))
        self._longest = min(LONGEST, positions)
        # Layers are compiled, as in a run. Compiled steps are shorter, and new weights wait for a step to end.
        config = EngineConfig(kv="keep", slots=rows, cache_tokens=(rows + 1) * (self._longest + 64))
        self._core = TimedCore(
            model, config, name=begin.name, max_length=self._longest, version=0, adapter=adapter, base_digest=base
        )
        self._draw = np.random.default_rng(begin.options.seed)
        self._vocabulary = vocabulary_of(model)
        self._submitted = 0
        self._core.submit(self._requests(rows))
        while self._core.counters().generated_tokens < rows * _WARM_TOKENS:
            self._replace(self._core.step())
        self.loop = EngineLoop(self._core, self._replace)

    def take(self, manifest: Manifest, received_at: float) -> Taken:
        """Load a version while the engine decodes. Return once it is proved and a token was drawn under it."""
        proof = self.loop.load(manifest).result(PROOF_SECONDS)
        while proof.accepted and self._core.drawn_version < manifest.version:
            _check_time(manifest, received_at)
            time.sleep(_POLL_SECONDS)
        taken = self._core.taken
        taken.refused, taken.received_at, taken.first_token_at = proof.reason, received_at, self._core.drawn_at
        # Without a GPU there is no gap between launches: decoding waits for the whole call of `install`.
        taken.swap_seconds = self._core.timings.longest_gap_seconds or taken.installed_at - taken.install_began_at
        return taken

    def _replace(self, deltas: list[Delta]) -> None:
        """Replace the sequences that have ended."""
        for delta in deltas:
            if delta.finish == "failed":
                raise HeadraceError(f"the engine failed: {delta.error}")
            if delta.finish == "length":
                self._core.submit(self._requests(1))

    def _requests(self, count: int) -> list[Request]:
        first, self._submitted = self._submitted, self._submitted + count
        return [
            Request(
                id=f"row-{number}",
                token_ids=self._draw.integers(0, self._vocabulary, PROMPT).astype(np.int32),
                sampling=Sampling(max_tokens=self._longest - PROMPT, seed=number),
            )
            for number in range(first, self._submitted)
        ]


def decode(line: Connection, begin: Begin) -> None:
    """Take versions as an engine that decodes. Versions are received beside the thread that makes the steps."""
    engine = DecodingEngine(begin)
    # The process of a real engine does the same, once everything is loaded.
    give_way_to_decoding()
    line.send(Ready())

    def receive() -> None:
        try:
            while True:
                manifest = line.receive(Manifest)
                line.send(engine.take(manifest, time.monotonic()))
        except EOFError:
            return
        finally:
            engine.loop.stop()

    threading.Thread(target=receive, name="versions", daemon=True).start()
    engine.loop.run()


def _check_time(manifest: Manifest, began: float) -> None:
    if time.monotonic() - began > PROOF_SECONDS:
        raise DeliveryError(f"version {manifest.version} was not proved within {PROOF_SECONDS:g} s")


def serve(line: Connection) -> None:
    """Load the model, and take versions until the connection is closed."""
    begin = line.receive(Begin)
    torch.set_num_threads(begin.options.threads)
    try:
        (decode if begin.options.decode else hold)(line, begin)
    except EOFError:
        return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

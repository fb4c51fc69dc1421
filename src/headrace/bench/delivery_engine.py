"""The process of an engine in a delivery benchmark. It holds a model, and fetches, swaps and proves each version.

By default nothing runs beside the deliveries, and the canary is scored last and timed by itself. With `decode`, a real
engine decodes all the time: staging runs beside its steps, and the swap is measured as the time by which it delays the
steps. A sequence that ends is replaced by a new one. So the batch is always full, and no delivery is measured on an
idle engine.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import torch

from headrace.bench.base import load, vocabulary_of
from headrace.bench.engine_checks import plain_twin, score_canary
from headrace.bench.options import DeliveryBench
from headrace.bench.side import IDLE_SECONDS, Connection, Ready
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.digest import digest
from headrace.delivery.receiver import Receiver, Staged
from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.setup import give_way_to_decoding
from headrace.errors import DeliveryError, HeadraceError
from headrace.models.loading import named_weights
from headrace.models.lora import ALL_LINEAR, Adapter, LoraSpec

RANK = 16
"""The rank of the adapter that is sent."""
PROMPT = 16
LONGEST = 512
"""The length of a sequence in tokens, including its prompt."""
PROOF_SECONDS = 300.0
_POLL_SECONDS = 0.0001
_STEPS = 16
"""The number of steps over which the time of a step is first measured, after as many steps that are not measured."""


class Enter(msgspec.Struct, kw_only=True):
    """The first message to an engine's process: which model to load, and how.

    The options name the device and the dtype; they are never `auto` or empty here.
    """

    name: str
    options: DeliveryBench
    adapter: bool


class Taken(msgspec.Struct, kw_only=True):
    """The answer to a manifest: the proof, and how long each part took.

    Fields that end in `_at` are times of the monotonic clock, which all processes of a host share.
    """

    proof: Proof
    fetch_seconds: float
    stage_seconds: float
    """The time to fetch and check the version. It includes `fetch_seconds`."""
    swap_seconds: float
    """The time of the copy over the live weights and of their digest. For a decoding engine: the time by which the swap
    delayed its steps."""
    proved_at: float
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


def served_adapter(model: Any) -> tuple[Adapter, int]:
    """Attach an adapter to this model, as an engine serves it (merged).

    Return the adapter and the digest of the weights under it.
    """
    base = digest(named_weights(model).items())
    return Adapter(model, LoraSpec(rank=RANK, alpha=2.0 * RANK, targets=(ALL_LINEAR,)), "merged"), base


class HoldingEngine:
    """A `BenchEngine` that only holds the weights of a model. The plain model scores the canary."""

    def __init__(self, enter: Enter) -> None:
        model, adapter, base = _served(enter)
        self._receiver = Receiver(
            adapter.weights() if adapter else named_weights(model),
            enter.name,
            installed=adapter.apply if adapter else None,
            base_digest=base,
        )
        self._twin: Any = plain_twin(model)

    def stage(self, manifest: Manifest) -> Staged:
        """Fetch and check a version. This is called in another thread than the other methods."""
        return self._receiver.stage(manifest)

    def take(self, staged: Staged) -> Taken:
        """Make the staged weights live, prove them, and return the measured times."""
        manifest, began = staged.manifest, time.monotonic()
        with torch.no_grad():
            installed = self._receiver.install(staged)
        while not installed.ready():
            _check_time(manifest, began)
            time.sleep(_POLL_SECONDS)
        proved_at = time.monotonic()
        logprobs = score_canary(self._twin, manifest.canary.token_ids)
        canary = time.monotonic() - proved_at
        return Taken(
            proof=self._receiver.prove(installed, logprobs),
            fetch_seconds=staged.fetch_seconds,
            stage_seconds=staged.seconds,
            swap_seconds=proved_at - began,
            proved_at=proved_at,
            canary_seconds=canary,
        )

    def close(self) -> None:
        """Release what deliveries hold."""
        self._receiver.close()


class DecodingEngine:
    """An engine that decodes a full batch all the time."""

    def __init__(self, enter: Enter) -> None:
        model, adapter, base = _served(enter)
        rows = enter.options.decode
        positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", LONGEST))
        self._longest = min(LONGEST, positions)
        # Layers are compiled, as in a run. Compiled steps are shorter, and new weights wait for a step to end.
        config = EngineConfig(kv="keep", slots=rows, cache_tokens=(rows + 1) * (self._longest + 64))
        self._core = EngineCore(
            model, config, name=enter.name, max_length=self._longest, version=0, adapter=adapter, base_digest=base
        )
        self._draw = np.random.default_rng(enter.options.seed)
        self._vocabulary = vocabulary_of(model)
        self._submitted = 0
        self._submit(rows)
        self._first_step_seconds = self._warm()

    def stage(self, manifest: Manifest) -> Staged:
        """See `HoldingEngine.stage`."""
        return self._core.stage(manifest)

    def take(self, staged: Staged) -> Taken:
        """Install the weights between two steps, and decode until they are proved and have drawn a token."""
        step = self._step()
        self._core.timings.reset()
        began = time.monotonic()
        self._core.install(staged)
        installed = time.monotonic()
        taken = self._proved(staged, installed)
        # Without a GPU there is no gap between launches: decoding waits for the whole call of `install`.
        taken.swap_seconds = self._core.timings.longest_gap_seconds or installed - began
        taken.install_began_at, taken.step_seconds = began, step
        return taken

    def turn(self) -> None:
        """Run one step, and replace the sequences that ended in it."""
        for delta in self._core.step():
            if delta.finish == "failed":
                raise HeadraceError(f"the engine failed: {delta.error}")
            if delta.finish is not None:
                self._submit(1)

    def close(self) -> None:
        """See `HoldingEngine.close`."""
        self._core.close()

    def _proved(self, staged: Staged, installed: float) -> Taken:
        version, proof = staged.manifest.version, None
        proved_at, last_token_at, first_token_at = 0.0, installed, 0.0
        while proof is None or not first_token_at:
            if proof is None and (proof := self._core.proof(wait=False)) is not None:
                proved_at = time.monotonic()
                if not proof.accepted:
                    break
            known = self._core.counters().generated_tokens
            self.turn()
            if not first_token_at and self._core.drawn_version >= version:
                first_token_at = self._core.drawn_at
            elif not first_token_at and self._core.counters().generated_tokens > known:
                last_token_at = time.monotonic()
            _check_time(staged.manifest, installed)
        return Taken(
            proof=proof,
            fetch_seconds=staged.fetch_seconds,
            stage_seconds=staged.seconds,
            swap_seconds=0.0,
            proved_at=proved_at,
            installed_at=installed,
            last_token_at=last_token_at,
            first_token_at=first_token_at,
        )

    def _step(self) -> float:
        """Return the mean seconds of a decode step since the last delivery, or before that of the warm-up."""
        timings = self._core.timings
        if not timings.steps:
            return self._first_step_seconds
        return (timings.device_seconds or timings.host_seconds) / timings.steps

    def _submit(self, count: int) -> None:
        requests = []
        for _ in range(count):
            prompt = self._draw.integers(0, self._vocabulary, PROMPT).astype(np.int32)
            sampling = Sampling(max_tokens=self._longest - PROMPT, seed=self._submitted)
            requests.append(Request(id=f"row-{self._submitted}", token_ids=prompt, sampling=sampling))
            self._submitted += 1
        self._core.submit(requests)

    def _warm(self) -> float:
        """Run the first steps, and return the mean seconds of a decode step."""
        while not self._core.counters().generated_tokens:
            self.turn()
        for _ in range(_STEPS):
            self.turn()
        tokens, rows, began = self._core.counters().generated_tokens, self._core.counters().running, time.monotonic()
        while (drawn := self._core.counters().generated_tokens - tokens) < _STEPS * rows:
            self.turn()
        # Steps are counted by their tokens, because on a GPU the host plans several steps at a time.
        return (time.monotonic() - began) * rows / drawn


def _served(enter: Enter) -> tuple[Any, Adapter | None, int | None]:
    options = enter.options
    model = load(options.model, options.dtype, options.device, options.seed)
    return model, *(served_adapter(model) if enter.adapter else (None, None))


def _check_time(manifest: Manifest, began: float) -> None:
    if time.monotonic() - began > PROOF_SECONDS:
        raise DeliveryError(f"version {manifest.version} was not proved within {PROOF_SECONDS:g} s")


class Orders:
    """Receives versions in a thread of its own and stages each at once. The engine takes them between two steps."""

    def __init__(self, line: Connection, engine: HoldingEngine | DecodingEngine) -> None:
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
                manifest = self._line.receive(Manifest)
                received = time.monotonic()
                self._staged.put((self._engine.stage(manifest), received, time.monotonic()))
        except (EOFError, OSError, HeadraceError, RuntimeError) as error:
            # `next` raises it in the thread that drives the engine. Here it would be lost with this thread.
            self._staged.put(error)


def serve(line: Connection) -> None:
    """Load the sets, and answer requests until the connection is closed."""
    enter = line.receive(Enter)
    torch.set_num_threads(enter.options.threads)
    engine = DecodingEngine(enter) if enter.options.decode else HoldingEngine(enter)
    # The process of a real engine does the same, once everything is loaded.
    give_way_to_decoding()
    line.send(Ready())
    orders = Orders(line, engine)
    try:
        while True:
            while isinstance(engine, DecodingEngine) and not orders.waiting():
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

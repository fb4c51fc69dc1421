"""An engine that decodes while weights arrive. Staging runs beside its steps; only the swap is between two steps.

A sequence that ends is replaced by a new one. So the batch is always full, and no delivery is measured on an idle
engine.
"""

from __future__ import annotations

import time

import numpy as np

from headrace.bench.delivery_messages import Enter, Taken
from headrace.bench.delivery_sets import load, served_adapter
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Manifest
from headrace.delivery.receiver import Staged
from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.errors import DeliveryError, HeadraceError

PROMPT = 16
LONGEST = 512
"""The length of a sequence in tokens, including its prompt."""
DEADLINE = 300.0
_STEPS = 16
"""The number of steps over which the time of a step is first measured, after as many steps that are not measured."""


class DecodingEngine:
    """A `BenchEngine` that decodes a full batch all the time."""

    def __init__(self, enter: Enter) -> None:
        model = load(enter.model, enter.dtype, enter.device, enter.seed)
        adapter, base = served_adapter(model) if enter.adapter else (None, None)
        positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", LONGEST))
        self._longest = min(LONGEST, positions)
        # Layers are compiled, as in a run. Compiled steps are shorter, and new weights wait for a step to end.
        config = EngineConfig(kv="keep", slots=enter.decode, cache_tokens=(enter.decode + 1) * (self._longest + 64))
        self._core = EngineCore(
            model, config, name=enter.name, max_length=self._longest, version=0, adapter=adapter, base_digest=base
        )
        self._draw = np.random.default_rng(enter.seed)
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._submitted = 0
        self._submit(enter.decode)
        self._first_step_seconds = self._warm()

    def stage(self, manifest: Manifest) -> Staged:
        """See `BenchEngine.stage`."""
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
        """See `BenchEngine.close`."""
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
            now = time.monotonic()
            if not first_token_at and self._core.drawn_version >= version:
                first_token_at = self._core.drawn_at
            elif not first_token_at and self._core.counters().generated_tokens > known:
                last_token_at = now
            if now > installed + DEADLINE:
                raise DeliveryError(f"version {version} was not proved within {DEADLINE:g} s")
        return Taken(
            proof=proof,
            fetch_seconds=staged.fetch_seconds,
            stage_seconds=staged.seconds,
            swap_seconds=0.0,
            canary_seconds=0.0,
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

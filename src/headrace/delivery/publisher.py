"""The trainer's end of delivery: a version is copied while the trainer waits, and proved ready while it goes on.

The manifest's digest is taken from the bytes that the engines will read, not from the trainer's tensors, and it exists
before anybody hears of the version. A version's place is not written again before `acknowledged`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from headrace.delivery.base import Canary, Manifest
from headrace.delivery.digest import digest
from headrace.delivery.plan import Plan, plan_weights
from headrace.delivery.transports.base import Sender
from headrace.errors import DeliveryError
from headrace.types import NO_VERSION, Float32Array, Int32Array


class Publisher:
    """Publishes versions in order through one sender, which it closes. All methods may be called from any thread."""

    def __init__(
        self,
        sender: Sender,
        dtype: str,
        tolerance: float,
        canary_token_ids: Int32Array,
        *,
        deadline: float = 120.0,
    ) -> None:
        self._sender = sender
        self._dtype = dtype
        self._tolerance = tolerance
        self._canary_token_ids = np.asarray(canary_token_ids, np.int32)
        self._deadline = deadline
        self._publishing = threading.Lock()
        self._newest = NO_VERSION
        self._locations: dict[int, str] = {}
        self._digests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self.last_snapshot_seconds = 0.0
        """How long the last cast and copy took, without the wait for a free place and the canary."""

    def publish(
        self,
        version: int,
        parent: int,
        step: int,
        weights: Mapping[str, torch.Tensor],
        canary: Callable[[Int32Array], Float32Array],
    ) -> Future[Manifest]:
        """Snapshot the weights and score the canary now; the future resolves once the snapshot is digested.

        The caller may change its weights on return. `canary` gives the log-probabilities of tokens 1..n. Raises
        `DeliveryError` when no place comes free before the deadline, and for what cannot be served.
        """
        with self._publishing:
            if version <= self._newest:
                raise DeliveryError(f"version {version} cannot follow version {self._newest}")
            self._sender.wait(version, self._deadline)
            logprobs = self._score(version, canary)
            started = time.monotonic()
            plan = plan_weights(weights, self._dtype)
            location = self._sender.write(version, plan, weights)
            self.last_snapshot_seconds = time.monotonic() - started
            self._newest = version
            self._locations[version] = location
        manifest = Manifest(
            version=version,
            parent=parent,
            step=step,
            transport=self._sender.name,
            location=location,
            entries=list(plan.entries),
            plan_digest=plan.digest,
            digest=0,
            canary=Canary(token_ids=self._canary_token_ids, logprobs=logprobs, tolerance=self._tolerance),
        )
        return self._digests.submit(self._finish, manifest, plan)

    def acknowledged(self, version: int) -> None:
        """No engine reads this version any more: its place is free. Idempotent."""
        location = self._locations.pop(version, None)
        if location is not None:
            self._sender.release(location)

    def close(self) -> None:
        """End the digests and remove what the sender holds. Idempotent."""
        self._digests.shutdown(wait=True, cancel_futures=True)
        self._sender.close()

    def _finish(self, manifest: Manifest, plan: Plan) -> Manifest:
        self._sender.finish(manifest.location)
        manifest.digest = digest(self._sender.snapshot(manifest.location, plan).items())
        return manifest

    def _score(self, version: int, canary: Callable[[Int32Array], Float32Array]) -> Float32Array:
        logprobs = np.asarray(canary(self._canary_token_ids), np.float32)
        if logprobs.shape != (len(self._canary_token_ids) - 1,):
            raise DeliveryError(f"the canary of version {version} has log-probabilities of shape {logprobs.shape}")
        if not np.isfinite(logprobs).all():
            raise DeliveryError(f"the canary of version {version} has log-probabilities that are not finite")
        return logprobs

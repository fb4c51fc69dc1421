"""The trainer keeps the packed bytes of the last versions: deltas start from them, and late engines get them whole.

A version's bytes are kept until the version itself and a newer one are acknowledged; then their memory is reused.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch

from headrace.delivery.plan import PackingPlan, pack
from headrace.delivery.transports.places import SenderPlaces
from headrace.types import NO_VERSION


class Snapshots:
    """Packed snapshots by version. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._places = SenderPlaces("snapshot", "publisher")
        """The versions that are not acknowledged; the location of a snapshot is its version."""
        self._packed: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []
        self._acknowledged = NO_VERSION
        self._lock = threading.Lock()

    def wait(self, version: int, timeout: float) -> None:
        """Wait until fewer than two versions are unacknowledged; after `timeout`, raise `DeliveryError` naming them."""
        self._places.wait(version, timeout)

    def take(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights, cast to the plan's dtypes."""
        with self._places.filling(version, lambda held: str(version), self._places.release):
            with self._lock:
                fitting = [buffer for buffer in self._free if len(buffer) == plan.nbytes]
                buffer = fitting[0] if fitting else torch.zeros(plan.nbytes, dtype=torch.uint8)
                self._free = fitting[1:]
            pack(buffer, plan.entries, weights)
            with self._lock:
                self._packed[version] = buffer

    def bytes_of(self, version: int) -> torch.Tensor | None:
        """Return the packed bytes of a version; None if they are no longer kept."""
        with self._lock:
            return self._packed.get(version)

    def settled_before(self, version: int, timeout: float) -> int:
        """Wait until all versions before this one are acknowledged, and return the newest acknowledged version.

        Returns `NO_VERSION` if that takes longer than `timeout` seconds.
        """
        done = self._places.settled_before(version, timeout)
        with self._lock:
            return self._acknowledged if done else NO_VERSION

    def acknowledged(self, version: int) -> None:
        """Record that all engines hold this version or a newer one. Idempotent."""
        with self._lock:
            if not self._places.holds(str(version)):
                return
            self._acknowledged = max(self._acknowledged, version)
            self._places.release(str(version))
            for old in [v for v in self._packed if v < self._acknowledged and not self._places.holds(str(v))]:
                self._free.append(self._packed.pop(old))

    def close(self) -> None:
        """Release all memory; a thread that waits for a snapshot gets a `DeliveryError`. Idempotent."""
        self._places.close()
        with self._lock:
            self._packed.clear()
            self._free.clear()

"""The packed bytes of the last versions, which the trainer keeps if it sends deltas.

A delta is computed against the bytes of an older version, and a late engine gets all bytes of a version. The bytes of a
version are kept until the version itself and a newer one are acknowledged. Then their memory is reused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import torch

from headrace.delivery.plan import PackingPlan, pack
from headrace.errors import DeliveryError
from headrace.types import NO_VERSION

UNACKNOWLEDGED = 2
"""The most versions that may be unacknowledged: one that engines fetch, and one that the trainer makes meanwhile."""


class Snapshots:
    """Packed snapshots by version. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._packed: dict[int, torch.Tensor] = {}
        self._pending: dict[int, float] = {}
        self._free: list[torch.Tensor] = []
        self._acknowledged = NO_VERSION
        self._changed = threading.Condition()
        self._closed = False

    def wait(self, version: int, timeout: float) -> None:
        """Wait until fewer than two versions are unacknowledged; after `timeout`, raise `DeliveryError` naming them."""
        with self._changed:
            room = self._changed.wait_for(lambda: self._closed or len(self._pending) < UNACKNOWLEDGED, timeout)
            if not room or self._closed:
                raise self._refusal(version)

    def take(self, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        """Store a copy of the weights as this version, cast to the plan's dtypes. It is unacknowledged from now on."""
        with self._changed:
            fitting = [buffer for buffer in self._free if len(buffer) == plan.nbytes]
            buffer = fitting[0] if fitting else torch.zeros(plan.nbytes, dtype=torch.uint8)
            self._free = fitting[1:]
        pack(buffer, plan.entries, weights)
        with self._changed:
            self._packed[version] = buffer
            self._pending[version] = time.monotonic()

    def bytes_of(self, version: int) -> torch.Tensor | None:
        """Return the packed bytes of a version; None if they are no longer kept.

        The tensor is not a copy. Its memory is overwritten by a later version, once this version and a newer one are
        acknowledged.
        """
        with self._changed:
            return self._packed.get(version)

    def settled_before(self, version: int, timeout: float) -> int:
        """Wait until all versions before this one are acknowledged, and return the newest acknowledged version.

        Returns `NO_VERSION` if that takes longer than `timeout` seconds, or if `close` is called meanwhile.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._closed or all(pending >= version for pending in self._pending), timeout
            )
            return self._acknowledged if done and not self._closed else NO_VERSION

    def acknowledged(self, version: int) -> None:
        """Record that no engine needs the bytes of this version any more, except as the base of a delta. Idempotent."""
        with self._changed:
            if self._pending.pop(version, None) is None:
                return
            self._acknowledged = max(self._acknowledged, version)
            for old in [v for v in self._packed if v < self._acknowledged and v not in self._pending]:
                self._free.append(self._packed.pop(old))
            self._changed.notify_all()

    def close(self) -> None:
        """Release all memory. A thread in `wait` gets a `DeliveryError`, one in `settled_before` gets `NO_VERSION`.

        Idempotent.
        """
        with self._changed:
            self._closed = True
            self._packed.clear()
            self._free.clear()
            self._changed.notify_all()

    def _refusal(self, version: int) -> DeliveryError:
        if self._closed:
            return DeliveryError(f"no snapshot for version {version}: the publisher is closed")
        now = time.monotonic()
        holders = " and ".join(f"version {held} ({now - since:.1f} s)" for held, since in self._pending.items())
        return DeliveryError(f"no snapshot for version {version}: not acknowledged by the engines: {holders}")

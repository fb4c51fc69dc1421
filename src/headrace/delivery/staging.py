"""Where an engine's new weights come to lie before they are live: fetched, put together, and their digest compared.

The live weights are read here, by a version that is a change to them, and never written. What was handed on by another
engine and is wrong is fetched once more, from the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.delivery.base import Entry, Manifest
from headrace.delivery.delta import apply
from headrace.delivery.digest import digest
from headrace.delivery.growing_digest import GrowingDigest
from headrace.delivery.live import DeviceSide
from headrace.delivery.parts import fetch_parts
from headrace.delivery.plan import PackingPlan, all_on, copy_all, pack, unpack
from headrace.delivery.regions import whole
from headrace.delivery.transports import source
from headrace.delivery.transports.base import Growing, PredictsPlaces, Relaying, Source
from headrace.errors import DeliveryError


@dataclass(frozen=True, eq=False)
class Arrived:
    """Weights with the digest of their manifest."""

    weights: Mapping[str, torch.Tensor]
    shared: bool
    """They lie where the trainer wrote them, not in memory of the receiver's own."""
    fetched: float
    """When all of them were here, by the monotonic clock."""


class Staging:
    """A receiver's sources, and the memory of its own that they fill. Used by one thread at a time."""

    def __init__(
        self, live: Mapping[str, torch.Tensor], device: torch.device, gpu: DeviceSide | None, keys: Path | None
    ) -> None:
        self._live = live
        self._device = device
        self._gpu = gpu
        self._keys = keys
        self._sources: dict[str, Source] = {}
        self._unpacked: tuple[int, dict[str, torch.Tensor]] | None = None
        self.buffer: torch.Tensor | None = None
        """Where weights are that did not arrive on our device; made when it is first needed."""

    def fetch(self, manifest: Manifest, plan: PackingPlan, on_arrival: Callable[[], None]) -> Arrived:
        """The weights of this version; `on_arrival` is called when only their digest is still to be taken."""
        try:
            return self._digested(manifest, plan, on_arrival)
        except DeliveryError:
            opened = self._source(manifest.transport)
            if not isinstance(opened, Relaying) or not opened.relayed:
                raise
        # Another engine handed it on, and wrong: now it comes from the trainer.
        return self._digested(manifest, plan, on_arrival)

    def share(self, manifest: Manifest) -> None:
        """Hand what arrived on to other engines, where the transport does."""
        opened = self._source(manifest.transport)
        if isinstance(opened, Relaying) and not manifest.parts:
            opened.share(manifest.location, manifest.version)

    def verify(self, manifest: Manifest) -> None:
        """Raise unless what the trainer wrote for this version is still there."""
        self._source(manifest.transport).verify(manifest.location, manifest.version)

    def close(self) -> None:
        """Let go of the transports and the buffer. Idempotent."""
        for opened in self._sources.values():
            opened.close()
        self._sources.clear()
        self.buffer = self._unpacked = None

    def _digested(self, manifest: Manifest, plan: PackingPlan, on_arrival: Callable[[], None]) -> Arrived:
        with closing(GrowingDigest(plan.entries)) as growing:
            weights, shared = (
                (self._patched(manifest, plan), False)
                if manifest.kind == "delta"
                else self._fetched(manifest, plan, growing)
            )
            fetched = time.monotonic()
            on_arrival()
            take_digest = self._begin_digest(plan, weights, growing)
            if self._gpu:
                # Meanwhile: the GPU takes the digest.
                self._gpu.prepare_install(plan, self._live, weights)
            found = take_digest()
        if found != manifest.digest:
            raise DeliveryError(
                f"version {manifest.version} arrived wrong: its digest is {found:016x}, not {manifest.digest:016x}"
            )
        return Arrived(weights, shared, fetched)

    def _begin_digest(
        self, plan: PackingPlan, weights: Mapping[str, torch.Tensor], growing: GrowingDigest
    ) -> Callable[[], int]:
        """The digest of what has arrived, by whoever takes it soonest."""
        if self._gpu:
            return self._gpu.begin_digest(plan, weights)
        return growing.value if growing.begun else lambda: digest(weights.items())

    def _source(self, transport: str) -> Source:
        if transport not in self._sources:
            self._sources[transport] = source(transport, keys=self._keys, device=str(self._device))
        return self._sources[transport]

    def _opened(
        self, manifest: Manifest, entries: Sequence[Entry], growing: GrowingDigest | None = None
    ) -> tuple[Source, dict[str, torch.Tensor]]:
        opened, location, version = self._source(manifest.transport), manifest.location, manifest.version
        if growing and isinstance(opened, Growing) and not self._gpu:
            return opened, opened.open_growing(location, version, entries, growing.grown)
        return opened, opened.open(location, version, entries)

    def _fetched(
        self, manifest: Manifest, plan: PackingPlan, growing: GrowingDigest
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """The weights where they can be copied from in one go, and whether that is the trainer's memory."""
        if manifest.parts:
            return self._composed(manifest, plan), False
        opened, published = self._opened(manifest, plan.entries, growing)
        # A place is not written again before its version is acknowledged: what is on our device already stays there.
        here = all_on(self._device, published)
        if here and self._gpu and isinstance(opened, PredictsPlaces):
            for place in opened.upcoming(plan.entries):
                self._gpu.foresee(plan, self._live, place)
        weights = published if here else self._copied(published, plan)
        opened.verify(manifest.location, manifest.version)
        return weights, here and not opened.private

    def _composed(self, manifest: Manifest, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """The weights put together from what the ranks of a trainer published."""
        weights = self._own(plan)
        wanted = {entry.name: whole(entry.shape) for entry in plan.entries}
        fetch_parts(self._source(manifest.transport), manifest, weights, wanted)
        self._finish()
        return weights

    def _patched(self, manifest: Manifest, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """The live weights with what has changed in them."""
        if not manifest.payload or len(manifest.payload) != 1:
            raise DeliveryError(f"version {manifest.version} is a change without its one payload")
        opened, published = self._opened(manifest, manifest.payload)
        buffer = self._room(plan)
        pack(buffer, plan.entries, self._live)
        apply(published[manifest.payload[0].name], buffer[: plan.nbytes])
        opened.verify(manifest.location, manifest.version)
        self._finish()
        return unpack(buffer, plan.entries)

    def _copied(self, published: Mapping[str, torch.Tensor], plan: PackingPlan) -> dict[str, torch.Tensor]:
        weights = self._own(plan)
        copy_all(weights, published, non_blocking=True)
        self._finish()
        return weights

    def _finish(self) -> None:
        if self._gpu:
            self._gpu.finish_staging()

    def _own(self, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Memory of our own for all weights of this plan."""
        buffer = self._room(plan)
        if self._unpacked is None or self._unpacked[0] != plan.digest:
            self._unpacked = plan.digest, unpack(buffer, plan.entries)
        return self._unpacked[1]

    def _room(self, plan: PackingPlan) -> torch.Tensor:
        if self.buffer is None or len(self.buffer) < plan.nbytes:
            self.buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device=self._device)
            self._unpacked = None
        return self.buffer

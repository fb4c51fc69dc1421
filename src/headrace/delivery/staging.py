"""Staging fetches a version beside an engine's live weights, assembles it, and checks its digest and whether it fits.

Staging never writes to the live weights. It reads them only to apply a delta to a copy of them. If another engine
relayed wrong bytes, the version is fetched once more from the trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

import torch

from headrace.delivery.base import Manifest
from headrace.delivery.copying import all_on, copy_all
from headrace.delivery.delta import apply
from headrace.delivery.digest import GrowingDigest, digest
from headrace.delivery.live import DeviceSide
from headrace.delivery.parts import fetch_parts, whole
from headrace.delivery.plan import PackingPlan, Views, dtype_name, dtype_of, make_plan, pack, plan_digest
from headrace.delivery.transports import source
from headrace.delivery.transports.base import Growing, PredictsPlaces, Relaying, Source
from headrace.errors import DeliveryError, WrongBase

Arrived = tuple[Mapping[str, torch.Tensor], bool, float]
"""Weights that arrived and whose digest is the manifest's; whether they are still in the trainer's memory, where it
wrote them, and not in the receiver's own; and when all bytes had arrived, by the monotonic clock."""


class Staging:
    """The sources of one receiver, and the buffer that they fill. Used by one thread at a time."""

    def __init__(
        self, live: Mapping[str, torch.Tensor], device: torch.device, gpu: DeviceSide | None, keys: Path | None
    ) -> None:
        self._live = live
        self._device = device
        self._gpu = gpu
        self._keys = keys
        self._sources: dict[str, Source] = {}
        self.memory: Views | None = None
        """The receiver's own memory for weights that cannot stay where they arrived; allocated when first needed."""

    def fetch(self, manifest: Manifest, plan: PackingPlan, on_arrival: Callable[[], None]) -> Arrived:
        """Fetch this version and check its digest; `on_arrival` is called when only the digest is left to compute."""
        try:
            return self._digested(manifest, plan, on_arrival)
        except DeliveryError:
            opened = self._source(manifest.transport)
            if not isinstance(opened, Relaying) or not opened.relayed:
                raise
        # Another engine relayed the version and something was wrong, so this time it comes from the trainer.
        return self._digested(manifest, plan, on_arrival)

    def share(self, manifest: Manifest) -> None:
        """Offer the version that arrived to other engines, if the transport relays."""
        opened = self._source(manifest.transport)
        if isinstance(opened, Relaying) and not manifest.parts:
            opened.share(manifest.location, manifest.version)

    def verify(self, manifest: Manifest) -> None:
        """Raise `DeliveryError` unless the location still holds this version."""
        self._source(manifest.transport).verify(manifest.location, manifest.version)

    def close(self) -> None:
        """Close the transports and release the memory. Idempotent."""
        for opened in self._sources.values():
            opened.close()
        self._sources.clear()
        self.memory = None

    def _digested(self, manifest: Manifest, plan: PackingPlan, on_arrival: Callable[[], None]) -> Arrived:
        with closing(GrowingDigest(plan.entries)) as growing:
            weights, shared = (
                (self._patched(manifest, plan), False)
                if manifest.kind == "delta"
                else self._fetched(manifest, plan, growing)
            )
            fetched = time.monotonic()
            on_arrival()
            if self._gpu:
                take_digest = self._gpu.begin_digest(plan, weights)
                # Meanwhile the GPU computes the digest.
                self._gpu.prepare_install(plan, self._live, weights)
                found = take_digest()
            else:
                found = growing.value() if growing.begun else digest(weights.items())
        if found != manifest.digest:
            raise DeliveryError(
                f"version {manifest.version} arrived wrong: its digest is {found:016x}, not {manifest.digest:016x}"
            )
        return weights, shared, fetched

    def _source(self, transport: str) -> Source:
        if transport not in self._sources:
            self._sources[transport] = source(transport, keys=self._keys, device=str(self._device))
        return self._sources[transport]

    def _fetched(
        self, manifest: Manifest, plan: PackingPlan, growing: GrowingDigest
    ) -> tuple[dict[str, torch.Tensor], bool]:
        """Return weights that can be copied from directly, and whether they are in the trainer's memory."""
        if manifest.parts:
            return self._composed(manifest, plan), False
        opened = self._source(manifest.transport)
        if isinstance(opened, Growing) and not self._gpu:
            published = opened.open_growing(manifest.location, manifest.version, plan.entries, growing.grown)
        else:
            published = opened.open(manifest.location, manifest.version, plan.entries)
        # A place is not overwritten before its version is acknowledged, so weights on our device need no copy.
        here = all_on(self._device, published)
        if here and self._gpu and isinstance(opened, PredictsPlaces):
            for place in opened.upcoming(plan.entries):
                self._gpu.foresee(plan, self._live, place)
        weights = published if here else self._own(plan)
        if not here:
            copy_all(weights, published, non_blocking=True)
            self._finish()
        opened.verify(manifest.location, manifest.version)
        return weights, here and not opened.private

    def _composed(self, manifest: Manifest, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Assemble the weights from the parts that the ranks of a trainer published."""
        weights = self._own(plan)
        wanted = {entry.name: whole(entry.shape) for entry in plan.entries}
        fetch_parts(self._source(manifest.transport), manifest, weights, wanted)
        self._finish()
        return weights

    def _patched(self, manifest: Manifest, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Apply a delta to a copy of the live weights."""
        if not manifest.payload or len(manifest.payload) != 1:
            raise DeliveryError(f"version {manifest.version} is a change without its one payload")
        opened = self._source(manifest.transport)
        published = opened.open(manifest.location, manifest.version, manifest.payload)
        weights = self._own(plan)
        assert self.memory is not None
        pack(self.memory.packed, plan.entries, self._live)
        apply(published[manifest.payload[0].name], self.memory.packed[: plan.nbytes])
        opened.verify(manifest.location, manifest.version)
        self._finish()
        return weights

    def _finish(self) -> None:
        if self._gpu:
            self._gpu.finish_staging()

    def _own(self, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return views of the receiver's own memory for all weights of this plan."""
        if self.memory is None or len(self.memory.packed) < plan.nbytes:
            self.memory = Views(torch.empty(plan.nbytes, dtype=torch.uint8, device=self._device))
        return self.memory.of(plan.entries)


def agreed_plan(manifest: Manifest, live: Mapping[str, torch.Tensor], known: PackingPlan | None) -> PackingPlan:
    """Return the packing plan of a version, made from the engine's own tensors and the dtypes of the manifest.

    `live` holds the tensors that the engine serves. Raises `DeliveryError` if the manifest has another plan. `known` is
    the plan of the previous version; it is returned at once if the manifest has the same plan.
    """
    if known and known.digest == manifest.plan_digest and known.entries == tuple(manifest.entries):
        return known
    entries = {entry.name: entry for entry in manifest.entries}
    if missing := live.keys() - entries.keys():
        raise DeliveryError(f"version {manifest.version} lacks {_some(missing)}")
    if unknown := entries.keys() - live.keys():
        raise DeliveryError(f"version {manifest.version} has {_some(unknown)}, which this engine does not know")
    for name, tensor in live.items():
        entry = entries[name]
        if entry.shape != tuple(tensor.shape):
            raise DeliveryError(f"{name} is published with shape {entry.shape}, but lives with {tuple(tensor.shape)}")
        if dtype_of(entry.dtype).is_floating_point != tensor.is_floating_point():
            raise DeliveryError(f"{name} is published as {entry.dtype}, but lives as {dtype_name(tensor.dtype)}")
    plan = make_plan((name, entries[name].dtype, tensor.shape) for name, tensor in live.items())
    if not plan.digest == manifest.plan_digest == plan_digest(manifest.entries):
        raise DeliveryError(f"version {manifest.version} is packed by another plan than this engine's")
    return plan


def check_base(manifest: Manifest, *, proved: int, quarantined: bool, base_digest: int | None) -> None:
    """Raise unless the version is of the kind that this engine takes, and was made for the weights that it has.

    `proved` is the last version that was proved on this engine. In quarantine the live weights are not proved to be any
    version. `base_digest` is the digest of the weights under the adapter, or None if the engine takes no adapters. A
    delta to another version raises `WrongBase`; everything else raises a plain `DeliveryError`.
    """
    version = manifest.version
    if (manifest.kind == "adapter") != (base_digest is not None):
        wanted = "all weights, not an adapter" if base_digest is None else "an adapter"
        raise DeliveryError(f"version {version} is of kind {manifest.kind}, but this engine takes {wanted}")
    if manifest.kind == "adapter" and manifest.base_digest != base_digest:
        raise DeliveryError(
            f"version {version} is an adapter to weights with digest {manifest.base_digest:016x}, but this engine's"
            f" have {base_digest:016x}"
        )
    if manifest.kind == "delta" and (quarantined or proved != manifest.base):
        held = "unproved weights" if quarantined else f"version {proved}"
        raise WrongBase(f"version {version} is a change to version {manifest.base}, but this engine has {held}")


def check_casts(weights: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
    """Raise `DeliveryError` if the cast of a published tensor to the live tensor's dtype would lose precision."""
    for name, tensor in weights.items():
        target = live[name].dtype
        if target != tensor.dtype:
            back = tensor.to(target).to(tensor.dtype)
            # Compared as bytes, so that a NaN equals itself and the two zeros differ.
            if not torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
                raise DeliveryError(
                    f"{name} is published as {dtype_name(tensor.dtype)} and loses precision as the engine's"
                    f" {dtype_name(target)}"
                )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} and {len(ordered) - 1} more"

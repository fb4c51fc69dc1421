"""An engine's end of delivery: weights are proved before they touch the live ones, and again after.

`stage` works on memory of its own and leaves the live weights alone, whatever it finds. From the first byte that
`install` writes until `prove` succeeds the receiver is in quarantine: no exception makes unproved weights a version.

On a GPU only the copy stands in the way of decoding: `stage` has a stream of its own, and so has the live digest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.delivery.base import Entry, Manifest, Proof
from headrace.delivery.canary import Tolerance, canary_error
from headrace.delivery.delta import apply
from headrace.delivery.digest import digest
from headrace.delivery.live import DeviceCheck, DeviceSide, HostCheck
from headrace.delivery.parts import fetch_parts
from headrace.delivery.plan import Plan, copy_all, dtype_name, dtype_of, make_plan, pack, plan_digest, unpack
from headrace.delivery.regions import whole
from headrace.delivery.transports import source
from headrace.delivery.transports.base import Relaying, Source
from headrace.errors import DeliveryError, WrongBase
from headrace.types import NO_VERSION, Float32Array, Int32Array


@dataclass(frozen=True, eq=False)
class Staged:
    """Weights that arrived whole and wait in the receiver's buffer for the next `install`."""

    manifest: Manifest
    weights: Mapping[str, torch.Tensor]
    digest: int
    seconds: float
    fetch_seconds: float = 0.0
    """Of these, until the bytes were here: the rest is their proof."""
    shared: bool = False
    """They lie where the trainer wrote them, not in memory of the receiver's own."""


@dataclass(frozen=True, eq=False)
class Installed:
    """Weights that were copied over the live ones and wait for `prove`."""

    staged: Staged
    live: HostCheck | DeviceCheck
    """What a digest finds in the live weights now."""

    def ready(self) -> bool:
        """Whether `prove` need not wait for the live digest."""
        return self.live.ready()


class Receiver:
    """Keeps the live tensors of one engine up to date; they keep their addresses.

    `stage` may run in a thread of its own while the engine uses the live weights. `install`, `prove` and `swap` belong
    to the thread that runs passes, between two of them; on a GPU they work on its current stream.
    """

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        engine: str,
        keys: Path | None = None,
        installed: Callable[[], None] | None = None,
        base_digest: int | None = None,
    ) -> None:
        """`keys` is the file with the keys of the run, for transports that encrypt.

        `installed` is called as soon as new weights are in place, on the same stream, before they are digested and
        scored: there an engine brings up to date what it derives from them. `base_digest` is that of the weights under
        an adapter, where `weights` are an adapter's: then nothing but an adapter to the same weights is taken.
        """
        self._live = weights
        self._engine = engine
        self._keys = keys
        self._after_copy = installed
        self._base_digest = base_digest
        self._tolerance = Tolerance()
        self._plan: Plan | None = None
        self._device = next((tensor.device for tensor in weights.values()), torch.device("cpu"))
        self._gpu = DeviceSide(self._device) if self._device.type == "cuda" else None
        self._proved = NO_VERSION
        self._quarantined = False
        self._sources: dict[str, Source] = {}
        self._buffer: torch.Tensor | None = None
        self._unpacked: tuple[int, dict[str, torch.Tensor]] | None = None
        self._staged: Staged | None = None
        self._installed: Installed | None = None
        self._busy = threading.Lock()

    @property
    def version(self) -> int:
        """The version that the live weights are proved to be; `NO_VERSION` before the first and in quarantine."""
        return NO_VERSION if self._quarantined else self._proved

    @property
    def quarantined(self) -> bool:
        """The live weights are not those of any proved version."""
        return self._quarantined

    def stage(self, manifest: Manifest, on_arrival: Callable[[], None] = lambda: None) -> Staged:
        """Fetch and prove a version beside the live one. A version staged earlier and not swapped is gone then.

        `on_arrival` is called when all of it is here, and only its digest is still to be taken. Raises `DeliveryError`
        with the reason; the live weights and `version` are as before.
        """
        beside = self._gpu.staging() if self._gpu else nullcontext()
        with self._alone("stage", manifest.version), torch.no_grad(), beside:
            started = time.monotonic()
            self._staged = None
            self._check_order(manifest.version)
            self._check_base(manifest)
            plan = self._agreed_plan(manifest)
            weights, shared, fetched = self._arrived(manifest, plan, on_arrival)
            self._check_casts(weights)
            if self._gpu:
                self._gpu.prepare_live(plan, self._live)
            seconds = time.monotonic() - started
            self._staged = Staged(manifest, weights, manifest.digest, seconds, fetched - started, shared)
            self._share(manifest)
            return self._staged

    def install(self, staged: Staged) -> Installed:
        """Copy the staged version over the live one, which no version vouches for until it is proved.

        On a GPU this returns before the copy ends: it is ordered on the current stream like any other work there.
        """
        with self._alone("install", staged.manifest.version), torch.no_grad():
            return self._install(staged)

    def prove(self, installed: Installed, logprobs: Float32Array) -> Proof:
        """Compare the live digest, and the canary's log-probabilities under the live weights, with the manifest's.

        A proof that is not accepted leaves the receiver in quarantine until a version is proved, and so does a digest
        that does not come in time, which raises `DeliveryError`.
        """
        staged = installed.staged
        version = staged.manifest.version
        if installed is not self._installed:
            raise DeliveryError(f"version {version} is no longer installed")
        self._installed = None
        found = installed.live.digest()
        error = canary_error(staged.manifest.canary, logprobs)
        reason = _mismatch(staged, found, error, self._tolerance.of(staged.manifest.canary))
        self._quarantined = bool(reason)
        if not reason:
            self._proved = version
            self._tolerance.proved(error)
        return Proof(
            engine=self._engine,
            version=version,
            accepted=not reason,
            quarantined=bool(reason),
            reason=reason,
            staged_digest=staged.digest,
            live_digest=found,
            canary_error=error,
            stage_seconds=staged.seconds,
            swap_seconds=installed.live.seconds(),
        )

    def swap(self, staged: Staged, score: Callable[[Int32Array], Float32Array]) -> Proof:
        """Make the staged version the live one and prove it: `install` and `prove`, and no other delivery between.

        `score` gives the log-probabilities of tokens 1..n under the live weights. A proof that is not accepted, and an
        exception of `score`, leave the receiver in quarantine until a version is proved.
        """
        with self._alone("swap", staged.manifest.version), torch.no_grad():
            installed = self._install(staged)
            # A copy: what came over a channel is read-only, which torch does not take without a warning.
            return self.prove(installed, score(staged.manifest.canary.token_ids.copy()))

    def close(self) -> None:
        """Let go of the transports and the buffer. Idempotent."""
        for opened in self._sources.values():
            opened.close()
        self._sources.clear()
        self._staged = self._installed = self._buffer = self._unpacked = None
        if self._gpu:
            self._gpu.close()

    def _alone(self, what: str, version: int) -> _Exclusive:
        return _Exclusive(self._busy, f"cannot {what} version {version}: another delivery is under way")

    def _check_order(self, version: int) -> None:
        if version <= self._proved:
            raise DeliveryError(f"version {version} is out of order: version {self._proved} is live")

    def _install(self, staged: Staged) -> Installed:
        if staged is not self._staged:
            raise DeliveryError(f"version {staged.manifest.version} is no longer staged")
        # Again: a newer version may have been proved since this one was staged, or its place used again.
        self._check_order(staged.manifest.version)
        if staged.shared:
            self._sources[staged.manifest.transport].verify(staged.manifest.location, staged.manifest.version)
        started = time.monotonic()
        self._staged = self._installed = None
        self._quarantined = True
        live: HostCheck | DeviceCheck
        if self._gpu:
            live = self._gpu.install(lambda: copy_all(self._live, staged.weights), self._buffer, self._after_copy)
        else:
            copy_all(self._live, staged.weights)
            if self._after_copy:
                self._after_copy()
            live = HostCheck(digest(self._live_as(staged.manifest.entries)), started)
        self._installed = Installed(staged, live)
        return self._installed

    def _agreed_plan(self, manifest: Manifest) -> Plan:
        """The plan that follows from our own names and shapes, if it is the manifest's too."""
        known = self._plan
        if known and known.digest == manifest.plan_digest and known.entries == tuple(manifest.entries):
            return known
        entries = {entry.name: entry for entry in manifest.entries}
        if missing := self._live.keys() - entries.keys():
            raise DeliveryError(f"version {manifest.version} lacks {_some(missing)}")
        if unknown := entries.keys() - self._live.keys():
            raise DeliveryError(f"version {manifest.version} has {_some(unknown)}, which this engine does not know")
        for name, live in self._live.items():
            entry = entries[name]
            if entry.shape != tuple(live.shape):
                raise DeliveryError(f"{name} is published with shape {entry.shape}, but lives with {tuple(live.shape)}")
            if dtype_of(entry.dtype).is_floating_point != live.is_floating_point():
                raise DeliveryError(f"{name} is published as {entry.dtype}, but lives as {dtype_name(live.dtype)}")
        plan = make_plan((name, entries[name].dtype, live.shape) for name, live in self._live.items())
        if not plan.digest == manifest.plan_digest == plan_digest(manifest.entries):
            raise DeliveryError(f"version {manifest.version} is packed by another plan than this engine's")
        self._plan = plan
        return plan

    def _check_base(self, manifest: Manifest) -> None:
        """What does not carry all weights must be for those that are here."""
        version = manifest.version
        if (manifest.kind == "adapter") != (self._base_digest is not None):
            wanted = "all weights, not an adapter" if self._base_digest is None else "an adapter"
            raise DeliveryError(f"version {version} is of kind {manifest.kind}, but this engine takes {wanted}")
        if manifest.kind == "adapter" and manifest.base_digest != self._base_digest:
            raise DeliveryError(
                f"version {version} is an adapter to weights with digest {manifest.base_digest:016x}, but this engine's"
                f" have {self._base_digest:016x}"
            )
        if manifest.kind == "delta" and (self._quarantined or self._proved != manifest.base):
            held = "unproved weights" if self._quarantined else f"version {self._proved}"
            raise WrongBase(f"version {version} is a change to version {manifest.base}, but this engine has {held}")

    def _arrived(
        self, manifest: Manifest, plan: Plan, on_arrival: Callable[[], None]
    ) -> tuple[Mapping[str, torch.Tensor], bool, float]:
        """Weights with the manifest's digest, whether they are the trainer's memory, and when they were here."""
        try:
            return self._digested(manifest, plan, on_arrival)
        except DeliveryError:
            opened = self._source(manifest.transport)
            if not isinstance(opened, Relaying) or not opened.relayed:
                raise
        # Another engine handed it on, and wrong: now it comes from the trainer.
        return self._digested(manifest, plan, on_arrival)

    def _digested(
        self, manifest: Manifest, plan: Plan, on_arrival: Callable[[], None]
    ) -> tuple[Mapping[str, torch.Tensor], bool, float]:
        weights, shared = (
            (self._patched(manifest, plan), False) if manifest.kind == "delta" else self._fetched(manifest, plan)
        )
        fetched = time.monotonic()
        on_arrival()
        found = self._gpu.digest_staged(plan, weights) if self._gpu else digest(weights.items())
        if found != manifest.digest:
            raise DeliveryError(
                f"version {manifest.version} arrived wrong: its digest is {found:016x}, not {manifest.digest:016x}"
            )
        return weights, shared, fetched

    def _share(self, manifest: Manifest) -> None:
        opened = self._source(manifest.transport)
        if isinstance(opened, Relaying) and not manifest.parts:
            opened.share(manifest.location, manifest.version)

    def _source(self, transport: str) -> Source:
        if transport not in self._sources:
            self._sources[transport] = source(transport, keys=self._keys, device=str(self._device))
        return self._sources[transport]

    def _opened(self, manifest: Manifest, entries: Sequence[Entry]) -> tuple[Source, dict[str, torch.Tensor]]:
        opened = self._source(manifest.transport)
        return opened, opened.open(manifest.location, manifest.version, entries)

    def _fetched(self, manifest: Manifest, plan: Plan) -> tuple[dict[str, torch.Tensor], bool]:
        """The weights where they can be copied from in one go, and whether that is the trainer's memory."""
        if manifest.parts:
            return self._composed(manifest, plan), False
        opened, published = self._opened(manifest, plan.entries)
        # A place is not written again before its version is acknowledged: what is on our device already stays there.
        here = all(tensor.device == self._device for tensor in published.values())
        weights = published if here else self._copied(published, plan)
        opened.verify(manifest.location, manifest.version)
        return weights, here and not opened.private

    def _composed(self, manifest: Manifest, plan: Plan) -> dict[str, torch.Tensor]:
        """The weights put together from what the ranks of a trainer published."""
        weights = self._staging(plan)
        wanted = {entry.name: whole(entry.shape) for entry in plan.entries}
        fetch_parts(self._source(manifest.transport), manifest, weights, wanted)
        if self._gpu:
            self._gpu.finish_staging()
        return weights

    def _patched(self, manifest: Manifest, plan: Plan) -> dict[str, torch.Tensor]:
        """The live weights with what has changed in them."""
        if not manifest.payload or len(manifest.payload) != 1:
            raise DeliveryError(f"version {manifest.version} is a change without its one payload")
        opened, published = self._opened(manifest, manifest.payload)
        buffer = self._room(plan)
        pack(buffer, plan.entries, self._live)
        apply(published[manifest.payload[0].name], buffer[: plan.nbytes])
        opened.verify(manifest.location, manifest.version)
        if self._gpu:
            self._gpu.finish_staging()
        return unpack(buffer, plan.entries)

    def _copied(self, published: Mapping[str, torch.Tensor], plan: Plan) -> dict[str, torch.Tensor]:
        weights = self._staging(plan)
        copy_all(weights, published, non_blocking=True)
        if self._gpu:
            self._gpu.finish_staging()
        return weights

    def _staging(self, plan: Plan) -> dict[str, torch.Tensor]:
        """Memory of our own for all weights of this plan."""
        buffer = self._room(plan)
        if self._unpacked is None or self._unpacked[0] != plan.digest:
            self._unpacked = plan.digest, unpack(buffer, plan.entries)
        return self._unpacked[1]

    def _room(self, plan: Plan) -> torch.Tensor:
        if self._buffer is None or len(self._buffer) < plan.nbytes:
            self._buffer = torch.empty(plan.nbytes, dtype=torch.uint8, device=self._device)
            self._unpacked = None
        return self._buffer

    def _check_casts(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Live tensors of another dtype are fine only where the cast loses nothing."""
        for name, tensor in weights.items():
            live = self._live[name]
            if live.dtype != tensor.dtype:
                back = tensor.to(live.dtype).to(tensor.dtype)
                # As bytes: a NaN is equal to itself, and the two zeros differ.
                if not torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)):
                    raise DeliveryError(
                        f"{name} is published as {dtype_name(tensor.dtype)} and loses precision as the engine's"
                        f" {dtype_name(live.dtype)}"
                    )

    def _live_as(self, entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in entries:
            yield entry.name, self._live[entry.name].to(dtype_of(entry.dtype))


def _mismatch(staged: Staged, found: int, error: float, tolerance: float) -> str:
    if found != staged.manifest.digest:
        return f"the live weights have digest {found:016x}, not {staged.manifest.digest:016x}"
    if error > tolerance:
        return f"the canary is off by {error:.3g} (tolerance {tolerance:.3g})"
    return ""


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} and {len(ordered) - 1} more"


class _Exclusive:
    """Holds a lock or refuses at once: a delivery never waits for another."""

    def __init__(self, lock: threading.Lock, refusal: str) -> None:
        self._lock = lock
        self._refusal = refusal

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise DeliveryError(self._refusal)

    def __exit__(self, *_: object) -> None:
        self._lock.release()

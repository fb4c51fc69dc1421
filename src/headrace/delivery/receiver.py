"""An engine's end of delivery: new weights are checked before they replace the live weights, and proved afterwards.

`stage` fetches into separate memory and never changes the live weights, even if it fails. It reads them only to apply a
delta to a copy of them. If another engine relayed wrong bytes, the version is fetched once more from the trainer. The
receiver is in quarantine from the first byte that `install` writes until `prove` succeeds, so no exception can make
unproved weights a version.

On a GPU only the copy interrupts decoding: `stage` and the live digest run on their own streams.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.delivery.base import Manifest, Proof, Score, Tolerance, canary_error, some_names
from headrace.delivery.copying import all_on, copy_all
from headrace.delivery.delta import apply
from headrace.delivery.digest import GrowingDigest, digest
from headrace.delivery.live import DeviceSide
from headrace.delivery.parts import fetch_parts
from headrace.delivery.plan import PackingPlan, Views, dtype_name, dtype_of, make_plan, pack, plan_digest
from headrace.delivery.transports import source
from headrace.delivery.transports.base import Growing, PredictsPlaces, Relaying, Source
from headrace.errors import DeliveryError, WrongBase
from headrace.types import NO_VERSION, Float32Array


@dataclass(frozen=True, eq=False)
class Staged:
    """Weights that arrived complete, have the right digest, and wait for `install`."""

    manifest: Manifest
    weights: Mapping[str, torch.Tensor]
    seconds: float
    fetch_seconds: float
    """The part of `seconds` until all bytes had arrived; the rest was spent on checking them."""
    shared: bool
    """Whether the weights are still in the trainer's memory, where it wrote them, and not in the receiver's own."""


@dataclass(frozen=True, eq=False)
class Installed:
    """Weights that were copied over the live weights and wait for `prove`."""

    staged: Staged
    ready: Callable[[], bool]
    """Returns whether the digest of the live weights is done, so that `prove` does not wait for it."""
    digest: Callable[[], int]
    """Waits for the digest of the live weights and returns it."""
    seconds: Callable[[], float]
    """Returns how long the engine was stopped; called after `digest`."""


class Receiver:
    """Updates the live tensors of one engine in place; the tensors keep their addresses.

    `stage` may run in a separate thread while the engine uses the live weights. `install`, `prove` and `swap` must be
    called by the thread that runs forward passes, between two passes; on a GPU they use that thread's current stream.
    """

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        engine: str,
        keys: Path | None = None,
        installed: Callable[[], None] | None = None,
        base_digest: int | None = None,
    ) -> None:
        """Create a receiver that updates `weights`, the live tensors of `engine`.

        `keys` is the file with the keys of the run, for transports that encrypt. `installed` is called as soon as new
        weights are in place, on the same stream, before they are digested and scored; there an engine updates the
        values that it derives from its weights. If `weights` are an adapter's, `base_digest` is the digest of the
        weights under the adapter, and the receiver accepts only adapters to the same weights.
        """
        self._live = weights
        self._engine = engine
        self._after_copy = installed
        self._base_digest = base_digest
        self._tolerance = Tolerance()
        self._plan: PackingPlan | None = None
        device = next((tensor.device for tensor in weights.values()), torch.device("cpu"))
        self._gpu = DeviceSide(device) if device.type == "cuda" else None
        self._device = device
        self._keys = keys
        self._sources: dict[str, Source] = {}
        self._memory: Views | None = None
        """The receiver's own memory for weights that cannot stay where they arrived; allocated when first needed."""
        self._proved = NO_VERSION
        self._quarantined = False
        self._staged: Staged | None = None
        self._installed: Installed | None = None
        self._busy = threading.Lock()

    @property
    def version(self) -> int:
        """The version that the live weights were proved to be; `NO_VERSION` before the first and in quarantine."""
        return NO_VERSION if self._quarantined else self._proved

    @property
    def quarantined(self) -> bool:
        """Whether new weights were installed and are not proved, so that the engine must not serve."""
        return self._quarantined

    def stage(self, manifest: Manifest, on_arrival: Callable[[], None] = lambda: None) -> Staged:
        """Fetch a version beside the live weights and check its digest. A version staged earlier is discarded.

        `on_arrival` is called when all bytes have arrived and only the digest is left to compute. Raises
        `DeliveryError` with the reason if the version cannot be staged; the live weights and `version` do not change.
        """
        beside = self._gpu.staging() if self._gpu else nullcontext()
        with self._alone("stage", manifest.version), torch.no_grad(), beside:
            self._staged = None
            self._check_order(manifest.version)
            self._check_base(manifest)
            plan = self._plan = _agreed_plan(manifest, self._live, self._plan)
            started = time.monotonic()
            opened = self._source(manifest.transport)
            try:
                weights, shared, fetched = self._digested(manifest, plan, on_arrival)
            except DeliveryError:
                if not isinstance(opened, Relaying) or not opened.relayed:
                    raise
                # Another engine relayed the version and something was wrong, so this time it comes from the trainer.
                weights, shared, fetched = self._digested(manifest, plan, on_arrival)
            _check_casts(weights, self._live)
            self._staged = Staged(manifest, weights, time.monotonic() - started, fetched - started, shared)
            if isinstance(opened, Relaying) and not manifest.parts:
                opened.share(manifest.location, manifest.version)
            return self._staged

    def install(self, staged: Staged) -> Installed:
        """Copy the staged version over the live weights. The receiver is in quarantine until `prove` succeeds.

        On a GPU this method returns before the copy ends; the copy is enqueued on the current stream.
        """
        with self._alone("install", staged.manifest.version), torch.no_grad():
            return self._install(staged)

    def prove(self, installed: Installed, logprobs: Float32Array) -> Proof:
        """Compare the live digest, and the canary's log-probabilities under the live weights, with the manifest's.

        If the proof is not accepted, the receiver stays in quarantine until a version is proved. The same holds if the
        digest is not ready in time; then this raises `DeliveryError`.
        """
        staged = installed.staged
        version = staged.manifest.version
        if installed is not self._installed:
            raise DeliveryError(f"version {version} is no longer installed")
        self._installed = None
        found = installed.digest()
        error = canary_error(staged.manifest.canary, logprobs)
        tolerance = self._tolerance.of(staged.manifest.canary)
        reason = ""
        if found != staged.manifest.digest:
            reason = f"the live weights have digest {found:016x}, not {staged.manifest.digest:016x}"
        elif error > tolerance:
            reason = f"the canary is off by {error:.3g} (tolerance {tolerance:.3g})"
        self._quarantined = bool(reason)
        if not reason:
            self._proved = version
            self._tolerance.proved(staged.manifest.canary, error)
        return Proof(
            engine=self._engine,
            version=version,
            accepted=not reason,
            quarantined=bool(reason),
            reason=reason,
            staged_digest=staged.manifest.digest,
            live_digest=found,
            canary_error=error,
            stage_seconds=staged.seconds,
            swap_seconds=installed.seconds(),
        )

    def swap(self, staged: Staged, score: Score) -> Proof:
        """Make the staged version the live one and prove it: `install`, then `prove`, with no other delivery between.

        `score` gives the log-probabilities of tokens 1..n under the live weights. If the proof is not accepted or
        `score` raises, the receiver stays in quarantine until a version is proved.
        """
        with self._alone("swap", staged.manifest.version), torch.no_grad():
            installed = self._install(staged)
            # Copied, because arrays from a channel are read-only and torch warns about read-only arrays.
            return self.prove(installed, score(staged.manifest.canary.token_ids.copy()))

    def load(self, manifest: Manifest, score: Score) -> Proof:
        """Stage, swap and prove a version in one call, for an engine that runs no forward pass meanwhile.

        If the version cannot be staged, return a proof that is not accepted; the live weights do not change.
        """
        try:
            return self.swap(self.stage(manifest), score)
        except DeliveryError as error:
            return Proof(
                engine=self._engine,
                version=manifest.version,
                accepted=False,
                quarantined=self._quarantined,
                reason=str(error),
            )

    def close(self) -> None:
        """Close the transports and release the buffer. Idempotent."""
        for opened in self._sources.values():
            opened.close()
        self._sources.clear()
        self._memory = self._staged = self._installed = None
        if self._gpu:
            self._gpu.close()

    @contextmanager
    def _alone(self, what: str, version: int) -> Iterator[None]:
        """Raise at once if another delivery is under way: a delivery never waits for another delivery."""
        if not self._busy.acquire(blocking=False):
            raise DeliveryError(f"cannot {what} version {version}: another delivery is under way")
        try:
            yield
        finally:
            self._busy.release()

    def _check_order(self, version: int) -> None:
        if version <= self._proved:
            raise DeliveryError(f"version {version} is out of order: version {self._proved} is live")

    def _check_base(self, manifest: Manifest) -> None:
        """Raise unless the version is of the kind that this engine takes, and was made for the weights that it has.

        A delta to another version raises `WrongBase`; everything else raises a plain `DeliveryError`.
        """
        version, base_digest = manifest.version, self._base_digest
        if (manifest.kind == "adapter") != (base_digest is not None):
            wanted = "all weights, not an adapter" if base_digest is None else "an adapter"
            raise DeliveryError(f"version {version} is of kind {manifest.kind}, but this engine takes {wanted}")
        if manifest.kind == "adapter" and manifest.base_digest != base_digest:
            raise DeliveryError(
                f"version {version} is an adapter to weights with digest {manifest.base_digest:016x}, but this engine's"
                f" have {base_digest:016x}"
            )
        if manifest.kind == "delta" and (self._quarantined or self._proved != manifest.base):
            held = "unproved weights" if self._quarantined else f"version {self._proved}"
            raise WrongBase(f"version {version} is a change to version {manifest.base}, but this engine has {held}")

    def _install(self, staged: Staged) -> Installed:
        if staged is not self._staged:
            raise DeliveryError(f"version {staged.manifest.version} is no longer staged")
        # Checked again, because since staging a newer version may have been proved or the place overwritten.
        self._check_order(staged.manifest.version)
        if staged.shared:
            self._source(staged.manifest.transport).verify(staged.manifest.location, staged.manifest.version)
        started = time.monotonic()
        self._staged = self._installed = None
        self._quarantined = True
        if self._gpu:
            assert self._plan is not None
            buffer = self._memory.packed if self._memory else None
            checks = self._gpu.install(self._plan, self._live, staged.weights, buffer, self._after_copy)
            self._installed = Installed(staged, *checks)
        else:
            copy_all(self._live, staged.weights)
            if self._after_copy:
                self._after_copy()
            entries = staged.manifest.entries
            found = digest((entry.name, self._live[entry.name].to(dtype_of(entry.dtype))) for entry in entries)
            # The engine does nothing else until the proof, so it is stopped until then.
            self._installed = Installed(staged, lambda: True, lambda: found, lambda: time.monotonic() - started)
        return self._installed

    def _digested(
        self, manifest: Manifest, plan: PackingPlan, on_arrival: Callable[[], None]
    ) -> tuple[Mapping[str, torch.Tensor], bool, float]:
        """Return the weights, whether they are in the trainer's memory, and when all bytes had arrived."""
        with closing(GrowingDigest(plan.entries)) as growing:
            weights, shared = (
                (self._patched(manifest, plan), False)
                if manifest.kind == "delta" and not manifest.parts
                else self._fetched(manifest, plan, growing)
            )
            fetched = time.monotonic()
            on_arrival()
            if self._gpu:
                found = self._gpu.digest_staged(plan, self._live, weights)
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
        opened = self._source(manifest.transport)
        if manifest.parts:
            weights = self._own(plan)
            fetch_parts(opened, manifest, weights, self._live)
            self._finish_staging()
            return weights, False
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
            self._finish_staging()
        opened.verify(manifest.location, manifest.version)
        return weights, here and not opened.private

    def _patched(self, manifest: Manifest, plan: PackingPlan) -> dict[str, torch.Tensor]:
        if not manifest.payload or len(manifest.payload) != 1:
            raise DeliveryError(f"version {manifest.version} is a change without its one payload")
        opened = self._source(manifest.transport)
        published = opened.open(manifest.location, manifest.version, manifest.payload)
        weights = self._own(plan)
        assert self._memory is not None
        pack(self._memory.packed, plan.entries, self._live)
        apply(published[manifest.payload[0].name], self._memory.packed[: plan.nbytes])
        opened.verify(manifest.location, manifest.version)
        self._finish_staging()
        return weights

    def _finish_staging(self) -> None:
        if self._gpu:
            self._gpu.finish_staging()

    def _own(self, plan: PackingPlan) -> dict[str, torch.Tensor]:
        if self._memory is None or len(self._memory.packed) < plan.nbytes:
            self._memory = Views(torch.empty(plan.nbytes, dtype=torch.uint8, device=self._device))
        return self._memory.of(plan.entries)


def _agreed_plan(manifest: Manifest, live: Mapping[str, torch.Tensor], known: PackingPlan | None) -> PackingPlan:
    """Return the packing plan of a version, made from the engine's own tensors and the dtypes of the manifest.

    `live` holds the tensors that the engine serves. Raises `DeliveryError` if the manifest has another plan. `known` is
    the plan of the previous version; it is returned at once if the manifest has the same plan.
    """
    if known and known.digest == manifest.plan_digest and known.entries == tuple(manifest.entries):
        return known
    entries = {entry.name: entry for entry in manifest.entries}
    if missing := live.keys() - entries.keys():
        raise DeliveryError(f"version {manifest.version} lacks {some_names(missing)}")
    if unknown := entries.keys() - live.keys():
        raise DeliveryError(f"version {manifest.version} has {some_names(unknown)}, which this engine does not know")
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


def _check_casts(weights: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
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

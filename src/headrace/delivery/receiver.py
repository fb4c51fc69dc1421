"""An engine's end of delivery: new weights are checked before they replace the live weights, and proved afterwards.

`stage` fetches into separate memory and never changes the live weights, even if it fails. It reads them only to apply a
delta to a copy of them. If another engine relayed wrong bytes, the version is fetched once more from the trainer. The
receiver is in quarantine from the first byte that `install` writes until `prove` succeeds, so no exception can make
unproved weights a version.

On a GPU only the copy interrupts decoding: `stage` and the live digest run on their own streams.

Without a second copy of the weights (`staging = "none"`), a version that is not in memory which the engine can read in
place is fetched by `install`, straight over the live weights. A version that proves wrong is fetched again, once. If
that fails too, or the publisher dies in mid-copy, the old weights are gone: the receiver stays in quarantine until a
version is proved.

An engine may serve weights in another form than they arrive in (`headrace.delivery.conversion`). Then `stage` also
converts them, and the live digest is that of the converted weights.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from headrace.delivery.agreement import agreed_plan, check_casts, check_widths
from headrace.delivery.base import Manifest, Proof, Score, Tolerance, canary_error
from headrace.delivery.buckets import BUCKET_BYTES, cut
from headrace.delivery.conversion import Conversion, Converted, Converter
from headrace.delivery.copying import all_on, copy_all
from headrace.delivery.delta import apply
from headrace.delivery.digest import GrowingDigest, digest
from headrace.delivery.live import DeviceSide
from headrace.delivery.parts import fetch_parts
from headrace.delivery.plan import PackingPlan, Views, dtype_of, pack
from headrace.delivery.transports import source
from headrace.delivery.transports.base import Growing, PredictsPlaces, Relaying, Source, Spanning
from headrace.errors import DeliveryError, WrongBase
from headrace.types import NO_VERSION, Float32Array

logger = logging.getLogger(__name__)

BaseDigest = int | Callable[[], int]
"""The digest of the weights under an adapter, or a function that computes it."""
Staging = Literal["device", "host", "none"]
"""Where a receiver holds weights that cannot stay where they arrived. `device`: beside the live weights. `host`: in
host memory, which is pinned if the live weights are on a GPU. `none`: nowhere; they are copied straight over the live
weights."""


@dataclass(frozen=True, eq=False)
class Staged:
    """Weights that arrived complete, have the right digest, and wait for `install`."""

    manifest: Manifest
    weights: Mapping[str, torch.Tensor] | None
    """The weights; None if `install` fetches them, because there is no second copy."""
    seconds: float
    fetch_seconds: float
    """The part of `seconds` until all bytes had arrived; the rest was spent on checking them."""
    shared: bool
    """Whether the weights are still in the trainer's memory, where it wrote them, and not in the receiver's own."""
    converted: Converted | None = None
    """The weights in the form in which they become live, if that is another one. Then `weights` are these."""

    def as_published(self, live: int) -> int:
        """Return the digest of the live weights in a form that can be compared with the manifest's."""
        return self.converted.as_published(live) if self.converted is not None else live


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
        base_digest: BaseDigest | None = None,
        staging: Staging = "device",
        conversion: Conversion | None = None,
    ) -> None:
        """Create a receiver that updates `weights`, the live tensors of `engine`.

        `keys` is the file with the keys of the run, for transports that encrypt. `installed` is called as soon as new
        weights are in place, on the same stream, before they are digested and scored; there an engine updates the
        values that it derives from its weights. If `weights` are an adapter's, `base_digest` is the digest of the
        weights under the adapter, and the receiver accepts only adapters to the same weights. If it is a function,
        those weights are shared with other processes, and the function digests them at every delivery. `conversion`
        makes `weights` from versions that arrive in another form; it needs a place to stage them.
        """
        if conversion is not None and staging == "none":
            raise ValueError("weights that are converted need a place to be staged in")
        self._staging = staging
        self._converter = Converter(conversion, weights) if conversion is not None else None
        self._arriving = self._converter.arriving if self._converter is not None else weights
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
        self._touched = False
        """Whether the installation that was begun last has written to a live weight."""
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
            plan = self._plan = agreed_plan(manifest, self._arriving, self._plan)
            if self._fetches_late(manifest):
                check_widths(manifest, self._live)
                if self._gpu:
                    self._gpu.prepare_live(plan, self._live)
                on_arrival()
                self._staged = Staged(manifest, None, 0.0, 0.0, shared=False)
            else:
                self._staged = self._stage(manifest, plan, on_arrival)
            return self._staged

    def install(self, staged: Staged) -> Installed:
        """Copy the staged version over the live weights. The receiver is in quarantine until `prove` succeeds.

        On a GPU this method returns before the copy ends; the copy is enqueued on the current stream. Without a second
        copy of the weights it returns only when the live weights have the right digest, and fetches a wrong version
        again, once. If it then raises `DeliveryError` and the receiver is in quarantine, the old weights are gone.
        """
        with self._alone("install", staged.manifest.version), torch.no_grad():
            return self._installed_right(staged)

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
            installed = self._installed_right(staged)
            # Copied, because arrays from a channel are read-only and torch warns about read-only arrays.
            return self.prove(installed, score(staged.manifest.canary.token_ids.copy()))

    def load(self, manifest: Manifest, score: Score) -> Proof:
        """Stage, swap and prove a version in one call, for an engine that runs no forward pass meanwhile.

        If the version cannot be staged, return a proof that is not accepted; the live weights do not change, unless
        the proof says that the engine is in quarantine.
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
        if self._converter:
            self._converter.close()
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
        version = manifest.version
        base_digest = self._base_digest() if callable(self._base_digest) else self._base_digest
        if (manifest.kind == "adapter") != (base_digest is not None):
            wanted = "all weights, not an adapter" if base_digest is None else "an adapter"
            raise DeliveryError(f"version {version} is of kind {manifest.kind}, but this engine takes {wanted}")
        if manifest.kind == "adapter" and manifest.base_digest != base_digest:
            raise DeliveryError(
                f"version {version} is an adapter to weights with digest {manifest.base_digest:016x}, but this engine's"
                f" have {base_digest:016x}"
            )
        if manifest.kind == "delta" and self._converter is not None:
            raise WrongBase(f"version {version} is a change, and this engine does not keep what the change is made to")
        if manifest.kind == "delta" and (self._quarantined or self._proved != manifest.base):
            held = "unproved weights" if self._quarantined else f"version {self._proved}"
            raise WrongBase(f"version {version} is a change to version {manifest.base}, but this engine has {held}")

    def _fetches_late(self, manifest: Manifest) -> bool:
        """Return whether `install` fetches this version, because staging would need a second copy of the weights."""
        if self._staging != "none":
            return False
        if manifest.kind == "delta":
            raise WrongBase(f"version {manifest.version} is a change, and this engine has no second copy to change")
        return bool(manifest.parts) or isinstance(self._source(manifest.transport), Spanning)

    def _stage(self, manifest: Manifest, plan: PackingPlan, on_arrival: Callable[[], None]) -> Staged:
        started = time.monotonic()
        opened = self._source(manifest.transport)
        try:
            weights, shared, fetched = self._digested(manifest, plan, on_arrival)
        except DeliveryError:
            if not isinstance(opened, Relaying) or not opened.relayed:
                raise
            # Another engine relayed the version and something was wrong, so this time it comes from the trainer.
            weights, shared, fetched = self._digested(manifest, plan, on_arrival)
        check_casts(weights, self._arriving)
        converted = None
        if self._converter is not None:
            converted = self._converted(manifest, self._converter, weights)
            if shared:
                opened.verify(manifest.location, manifest.version)
            weights, shared = converted.weights, False
        if isinstance(opened, Relaying) and not manifest.parts:
            opened.share(manifest.location, manifest.version)
        return Staged(manifest, weights, time.monotonic() - started, fetched - started, shared, converted)

    def _converted(self, manifest: Manifest, converter: Converter, arrived: Mapping[str, torch.Tensor]) -> Converted:
        """Convert a version that arrived right, and digest the result, which the live weights must equal."""
        weights = converter.converted(arrived)
        found = self._gpu.digest_staged(converter.plan, self._live, weights) if self._gpu else digest(weights.items())
        return Converted(weights, converter.plan, manifest.digest, found)

    def _installed_right(self, staged: Staged) -> Installed:
        """Install a version. Without a second copy of the weights, wait for its digest, and fetch it again if wrong."""
        manifest = staged.manifest
        if staged is not self._staged:
            raise DeliveryError(f"version {manifest.version} is no longer staged")
        if self._staging != "none":
            return self._install(staged)
        self._touched, started = False, time.monotonic()
        try:
            return self._awaited(self._install(staged), started)
        except DeliveryError as error:
            if not self._touched:
                raise
            logger.warning("version %d is fetched again: %s", manifest.version, error)
        try:
            return self._awaited(self._install(self._fetched_again(manifest)), started)
        except DeliveryError as error:
            self._installed = None
            raise DeliveryError(f"{error}; the engine has no weights until a version is proved") from error

    def _awaited(self, installed: Installed, started: float) -> Installed:
        """Wait until the installed weights are digested; raises `DeliveryError` if they are wrong."""
        manifest = installed.staged.manifest
        found = installed.digest()
        if found != manifest.digest:
            raise DeliveryError(
                f"the live weights have digest {found:016x} after the copy of version {manifest.version}, not"
                f" {manifest.digest:016x}"
            )
        # The engine does nothing else until the proof, so it is stopped until then.
        self._installed = Installed(installed.staged, lambda: True, lambda: found, lambda: time.monotonic() - started)
        return self._installed

    def _fetched_again(self, manifest: Manifest) -> Staged:
        assert self._plan is not None
        if self._fetches_late(manifest):
            self._staged = Staged(manifest, None, 0.0, 0.0, shared=False)
            return self._staged
        with self._gpu.staging() if self._gpu else nullcontext():
            self._staged = self._stage(manifest, self._plan, lambda: None)
        return self._staged

    def _install(self, staged: Staged) -> Installed:
        # Checked again, because since staging a newer version may have been proved or the place overwritten.
        self._check_order(staged.manifest.version)
        if staged.shared:
            self._source(staged.manifest.transport).verify(staged.manifest.location, staged.manifest.version)
        started = time.monotonic()
        self._staged = self._installed = None
        if self._gpu:
            own = self._memory.packed if self._memory else None
            buffer = self._converter.packed if self._converter else own
            ready, live_digest, seconds = self._gpu.install(partial(self._copy, staged), buffer, self._after_copy)
            self._installed = Installed(staged, ready, lambda: staged.as_published(live_digest()), seconds)
        else:
            self._copy(staged)
            if self._after_copy:
                self._after_copy()
            entries = staged.converted.plan.entries if staged.converted else staged.manifest.entries
            live = digest((entry.name, self._live[entry.name].to(dtype_of(entry.dtype))) for entry in entries)
            found = staged.as_published(live)
            # The engine does nothing else until the proof, so it is stopped until then.
            self._installed = Installed(staged, lambda: True, lambda: found, lambda: time.monotonic() - started)
        return self._installed

    def _copy(self, staged: Staged) -> None:
        """Write the version over the live weights. The receiver is in quarantine from the first byte on."""
        assert self._plan is not None
        manifest = staged.manifest
        if staged.weights is not None:
            self._begin_writing()
            if self._gpu:
                plan = staged.converted.plan if staged.converted else self._plan
                self._gpu.copy(plan, self._live, staged.weights)
            else:
                copy_all(self._live, staged.weights)
        elif manifest.parts:
            self._copy_parts(manifest)
        else:
            self._copy_buckets(manifest, self._plan)

    def _copy_parts(self, manifest: Manifest) -> None:
        opened = self._source(manifest.transport)
        fetch_parts(opened, manifest, self._live, writing=self._begin_writing)
        if self._gpu:
            torch.cuda.current_stream(self._device).synchronize()
        if not opened.private:
            # Checked again, because a copy on a GPU may have ended only now.
            for part in manifest.parts:
                opened.verify(part.location, manifest.version)

    def _copy_buckets(self, manifest: Manifest, plan: PackingPlan) -> None:
        opened = self._source(manifest.transport)
        assert isinstance(opened, Spanning)
        buckets = cut(plan.entries, BUCKET_BYTES)
        largest = max(bucket.stop - bucket.start for bucket in buckets)
        memory = torch.empty(largest, dtype=torch.uint8, pin_memory=self._gpu is not None)
        with opened.spans(manifest.location, manifest.version, plan.entries) as read:
            for bucket in buckets:
                read(bucket.start, memory.numpy().data[: bucket.stop - bucket.start])
                self._begin_writing()
                copy_all(bucket.targets(self._live), bucket.unpack(memory))
        opened.verify(manifest.location, manifest.version)

    def _begin_writing(self) -> None:
        self._touched = self._quarantined = True

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
            if self._gpu and self._converter is None:
                found = self._gpu.digest_staged(plan, self._live, weights)
            elif self._gpu and all_on(self._device, weights):
                found = self._gpu.digest(plan, weights)
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
        # Without a second copy, the trainer's memory is read where it is, also from another device.
        in_place = here or self._staging == "none"
        weights = published if in_place else self._own(plan)
        if not in_place:
            copy_all(weights, published, non_blocking=True)
            self._finish_staging()
        opened.verify(manifest.location, manifest.version)
        return weights, in_place and not opened.private

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
        on_host = self._staging == "host" and self._gpu is not None
        if self._memory is None or len(self._memory.packed) < plan.nbytes:
            device = torch.device("cpu") if on_host else self._device
            self._memory = Views(torch.empty(plan.nbytes, dtype=torch.uint8, device=device, pin_memory=on_host))
        elif on_host and self._gpu:
            self._gpu.await_copy()
        return self._memory.of(plan.entries)

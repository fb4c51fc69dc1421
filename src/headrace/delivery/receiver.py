"""An engine's end of delivery: new weights are checked before they replace the live weights, and proved afterwards.

`stage` fetches into separate memory and never changes the live weights, even if it fails. The receiver is in quarantine
from the first byte that `install` writes until `prove` succeeds, so no exception can make unproved weights a version.

On a GPU only the copy interrupts decoding: `stage` and the live digest run on their own streams.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.delivery.base import Manifest, Proof
from headrace.delivery.canary import Score, Tolerance, canary_error
from headrace.delivery.copying import copy_all
from headrace.delivery.digest import digest
from headrace.delivery.live import DeviceSide
from headrace.delivery.plan import PackingPlan, dtype_of
from headrace.delivery.staging import Staging, agreed_plan, check_base, check_casts
from headrace.errors import DeliveryError
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
        self._staging = Staging(weights, device, self._gpu, keys)
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
            started = time.monotonic()
            self._staged = None
            self._check_order(manifest.version)
            check_base(manifest, proved=self._proved, quarantined=self._quarantined, base_digest=self._base_digest)
            plan = self._plan = agreed_plan(manifest, self._live, self._plan)
            weights, shared, fetched = self._staging.fetch(manifest, plan, on_arrival)
            check_casts(weights, self._live)
            self._staged = Staged(manifest, weights, time.monotonic() - started, fetched - started, shared)
            self._staging.share(manifest)
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
        reason = _mismatch(staged, found, error, self._tolerance.of(staged.manifest.canary))
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
        self._staging.close()
        self._staged = self._installed = None
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

    def _install(self, staged: Staged) -> Installed:
        if staged is not self._staged:
            raise DeliveryError(f"version {staged.manifest.version} is no longer staged")
        # Checked again, because since staging a newer version may have been proved or the place overwritten.
        self._check_order(staged.manifest.version)
        if staged.shared:
            self._staging.verify(staged.manifest)
        started = time.monotonic()
        self._staged = self._installed = None
        self._quarantined = True
        if self._gpu:
            assert self._plan is not None
            buffer = self._staging.memory.packed if self._staging.memory else None
            check = self._gpu.install(self._plan, self._live, staged.weights, buffer, self._after_copy)
            self._installed = Installed(staged, check.ready, check.digest, check.seconds)
        else:
            copy_all(self._live, staged.weights)
            if self._after_copy:
                self._after_copy()
            entries = staged.manifest.entries
            found = digest((entry.name, self._live[entry.name].to(dtype_of(entry.dtype))) for entry in entries)
            # The engine does nothing else until the proof, so it is stopped until then.
            self._installed = Installed(staged, lambda: True, lambda: found, lambda: time.monotonic() - started)
        return self._installed


def _mismatch(staged: Staged, found: int, error: float, tolerance: float) -> str:
    if found != staged.manifest.digest:
        return f"the live weights have digest {found:016x}, not {staged.manifest.digest:016x}"
    if error > tolerance:
        return f"the canary is off by {error:.3g} (tolerance {tolerance:.3g})"
    return ""

"""An engine's end of delivery: weights are proved before they touch the live ones, and again after.

`stage` works on memory of its own and leaves the live weights alone, whatever it finds. From the first byte that
`install` writes until `prove` succeeds the receiver is in quarantine: no exception makes unproved weights a version.

On a GPU only the copy stands in the way of decoding: `stage` has a stream of its own, and so has the live digest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.delivery.agreement import agreed_plan, check_base, check_casts
from headrace.delivery.base import Entry, Manifest, Proof
from headrace.delivery.canary import Score, Tolerance, canary_error
from headrace.delivery.digest import digest
from headrace.delivery.live import DeviceCheck, DeviceSide, HostCheck
from headrace.delivery.plan import PackingPlan, copy_all, dtype_of
from headrace.delivery.staging import Staging
from headrace.errors import DeliveryError
from headrace.types import NO_VERSION, Float32Array


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
            check_base(manifest, proved=self._proved, quarantined=self._quarantined, base_digest=self._base_digest)
            plan = self._plan = agreed_plan(manifest, self._live, self._plan)
            arrived = self._staging.fetch(manifest, plan, on_arrival)
            check_casts(arrived.weights, self._live)
            self._staged = Staged(
                manifest,
                arrived.weights,
                manifest.digest,
                seconds=time.monotonic() - started,
                fetch_seconds=arrived.fetched - started,
                shared=arrived.shared,
            )
            self._staging.share(manifest)
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
            self._tolerance.proved(staged.manifest.canary, error)
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

    def swap(self, staged: Staged, score: Score) -> Proof:
        """Make the staged version the live one and prove it: `install` and `prove`, and no other delivery between.

        `score` gives the log-probabilities of tokens 1..n under the live weights. A proof that is not accepted, and an
        exception of `score`, leave the receiver in quarantine until a version is proved.
        """
        with self._alone("swap", staged.manifest.version), torch.no_grad():
            installed = self._install(staged)
            # A copy: what came over a channel is read-only, which torch does not take without a warning.
            return self.prove(installed, score(staged.manifest.canary.token_ids.copy()))

    def load(self, manifest: Manifest, score: Score) -> Proof:
        """Stage, swap and prove a version at once, for an engine that makes no pass meanwhile.

        A version that cannot be staged is a proof that is not accepted; the live weights are as before then.
        """
        try:
            return self.swap(self.stage(manifest), score)
        except DeliveryError as error:
            reason = str(error)
        return Proof(
            engine=self._engine,
            version=manifest.version,
            accepted=False,
            quarantined=self._quarantined,
            reason=reason,
        )

    def close(self) -> None:
        """Let go of the transports and the buffer. Idempotent."""
        self._staging.close()
        self._staged = self._installed = None
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
            self._staging.verify(staged.manifest)
        started = time.monotonic()
        self._staged = self._installed = None
        self._quarantined = True
        live: HostCheck | DeviceCheck
        if self._gpu:
            assert self._plan is not None
            buffer = self._staging.buffer
            live = self._gpu.install(self._plan, self._live, staged.weights, buffer, self._after_copy)
        else:
            copy_all(self._live, staged.weights)
            if self._after_copy:
                self._after_copy()
            live = HostCheck(digest(self._live_as(staged.manifest.entries)), started)
        self._installed = Installed(staged, live)
        return self._installed

    def _live_as(self, entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in entries:
            yield entry.name, self._live[entry.name].to(dtype_of(entry.dtype))


def _mismatch(staged: Staged, found: int, error: float, tolerance: float) -> str:
    if found != staged.manifest.digest:
        return f"the live weights have digest {found:016x}, not {staged.manifest.digest:016x}"
    if error > tolerance:
        return f"the canary is off by {error:.3g} (tolerance {tolerance:.3g})"
    return ""


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

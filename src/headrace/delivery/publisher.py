"""The trainer's end of delivery: a version is copied while the trainer waits, and proved ready while it goes on.

The manifest's digest is taken from the bytes that the engines will hold, not from the trainer's tensors, and it exists
before anybody hears of the version. A version's place is not written again before `acknowledged`, and the newest
version can be fetched until there is a newer one: by an engine that comes late too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from headrace.delivery.base import Kind, Manifest
from headrace.delivery.canary import Score, score_canary
from headrace.delivery.delta import encode, word_bytes_of
from headrace.delivery.digest import digest
from headrace.delivery.held_places import HeldPlaces
from headrace.delivery.plan import PackingPlan, make_plan, plan_weights, unpack
from headrace.delivery.snapshots import Snapshots
from headrace.delivery.transports.base import Enqueuing, Sender
from headrace.errors import DeliveryError
from headrace.types import NO_VERSION, POLICY, Int32Array

if TYPE_CHECKING:
    from headrace.delivery.kernels.digest import DeviceDigest

PAYLOAD = "delta"
"""The name of the one tensor that a delta travels as."""


class Publisher:
    """Publishes versions in order through one sender, which it closes. All methods may be called from any thread."""

    def __init__(
        self,
        sender: Sender,
        dtype: str,
        tolerance: float | None,
        canary_token_ids: Int32Array,
        *,
        send: Kind = "full",
        base_digest: int = 0,
        deadline: float = 120.0,
        policy: str = POLICY,
    ) -> None:
        """`send` is what travels: a delta becomes full where it would not be smaller. `base_digest` is an adapter's.

        The weights are those of `policy`.
        """
        self._sender = sender
        self._policy = policy
        self._dtype = dtype
        self._tolerance = tolerance
        self.canary_token_ids = np.asarray(canary_token_ids, np.int32)
        """What is scored for every version."""
        self._send: Kind = send
        self._base_digest = base_digest
        self._deadline = deadline
        self._publishing = threading.Lock()
        self._newest = NO_VERSION
        # Snapshots of our own are there for latecomers as well: then no place need be.
        self._places = HeldPlaces(sender, keep_newest=send != "delta")
        self._snapshots = Snapshots() if send == "delta" else None
        self._finishing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        # Apart: a delta waits until the version before it is acknowledged, which a version sent again may lead to.
        self._resending = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resend")
        self._stream: torch.cuda.Stream | None = None
        self._plan: tuple[Any, PackingPlan] | None = None
        self._on_gpu: dict[str, tuple[int, DeviceDigest]] = {}
        self.last_snapshot_seconds = 0.0
        """How long the last cast and copy took, without the wait for a free place and the canary."""

    def publish(
        self,
        version: int,
        parent: int,
        step: int,
        weights: Mapping[str, torch.Tensor],
        canary: Score,
    ) -> Future[Manifest]:
        """Snapshot the weights and score the canary now; the future resolves once the version can be fetched.

        The caller may change its weights on return. `canary` gives the log-probabilities of tokens 1..n. Raises
        `DeliveryError` when no place comes free before the deadline, and for what cannot be served.
        """
        with self._publishing:
            if version <= self._newest:
                raise DeliveryError(f"version {version} cannot follow version {self._newest}")
            (self._snapshots or self._sender).wait(version, self._deadline)
            scored = score_canary(version, self.canary_token_ids, self._tolerance, canary)
            started = time.monotonic()
            plan = self._planned(weights)
            location = ""
            if self._snapshots:
                self._snapshots.take(version, plan, weights)
            else:
                location = self._sender.write(version, plan, weights)
                self._places.written(version, location)
            on_gpu = next((tensor.device for tensor in weights.values() if tensor.is_cuda), None)
            digesting = self._digest_at_once(location, plan, on_gpu)
            self.last_snapshot_seconds = time.monotonic() - started
            self._newest = version
        manifest = Manifest(
            version=version,
            policy=self._policy,
            parent=parent,
            step=step,
            transport=self._sender.name,
            location=location,
            entries=list(plan.entries),
            plan_digest=plan.digest,
            digest=0,
            canary=scored,
            kind="adapter" if self._send == "adapter" else "full",
            base_digest=self._base_digest,
        )
        if self._snapshots:
            return self._finishing.submit(self._finish_delta, manifest, plan)
        return self._finishing.submit(self._finish, manifest, plan, on_gpu, digesting)

    def resend(self, manifest: Manifest) -> Future[Manifest]:
        """The same version with all its weights, where they can be fetched now: a delta helps only who has its base.

        It is acknowledged like any other.
        """
        return self._resending.submit(self._whole if self._snapshots else lambda same: same, manifest)

    def acknowledged(self, version: int) -> None:
        """No engine reads this version any more: its place is free once there is a newer one. Idempotent."""
        self._places.acknowledged(version)
        if self._snapshots:
            self._snapshots.acknowledged(version)

    def close(self) -> None:
        """End what goes on and remove what the sender holds. Idempotent."""
        if self._snapshots:
            self._snapshots.close()
        for pool in (self._finishing, self._resending):
            pool.shutdown(wait=True, cancel_futures=True)
        self._on_gpu.clear()
        self._sender.close()

    def _finish(
        self, manifest: Manifest, plan: PackingPlan, gpu: torch.device | None, digesting: torch.Tensor | None
    ) -> Manifest:
        self._sender.finish(manifest.location)
        with self._beside(gpu):
            manifest.digest = self._digest(manifest.location, plan, digesting)
        return manifest

    def _planned(self, weights: Mapping[str, torch.Tensor]) -> PackingPlan:
        """The plan of these weights, which are those of the version before, with other values."""
        # As lists: tuples of them take three times as long to make and to compare, for hundreds of tensors.
        tensors = weights.values()
        layout = list(weights), [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
        if self._plan is None or self._plan[0] != layout:
            self._plan = layout, plan_weights(weights, self._dtype)
        return self._plan[1]

    def _digest_at_once(self, location: str, plan: PackingPlan, gpu: torch.device | None) -> torch.Tensor | None:
        """Enqueue the digest right behind the copy, where it is prepared and the sender's copy is enqueued too.

        A GPU that is shared would else turn to another process between the two.
        """
        known = self._on_gpu.get(location)
        if not isinstance(self._sender, Enqueuing) or known is None or known[0] != plan.digest:
            return None
        with self._beside(gpu):
            self._sender.follow(location)
            return known[1].launch()

    def _digest(self, location: str, plan: PackingPlan, digesting: torch.Tensor | None) -> int:
        written = self._sender.snapshot(location, plan)
        if not all(tensor.is_cuda for tensor in written.values()):
            return digest(written.items())
        # Late: only where there is a GPU is there a need for Triton. Prepared once for each of the few places.
        from headrace.delivery.kernels.digest import DeviceDigest

        if digesting is None:
            known = self._on_gpu.get(location)
            if known is None or known[0] != plan.digest:
                known = self._on_gpu[location] = plan.digest, DeviceDigest(written)
            digesting = known[1].launch()
        return DeviceDigest.value(digesting)

    def _finish_delta(self, manifest: Manifest, plan: PackingPlan) -> Manifest:
        assert self._snapshots is not None
        new = self._packed(manifest.version)
        manifest.digest = digest(unpack(new, plan.entries).items())
        # Engines go from version to version: this one changes what they hold when they have all taken the one before.
        base = self._snapshots.settled_before(manifest.version, self._deadline)
        held = self._snapshots.bytes_of(base) if base != NO_VERSION else None
        changes = encode(held, new, word_bytes_of(plan.entries)) if held is not None else None
        if changes is None:
            return self._whole(manifest)
        payload = make_plan([(PAYLOAD, "uint8", changes.shape)])
        manifest = msgspec.structs.replace(manifest, kind="delta", base=base, payload=list(payload.entries))
        return self._written(manifest, payload, {PAYLOAD: changes})

    def _whole(self, manifest: Manifest) -> Manifest:
        whole = msgspec.structs.replace(manifest, kind="full", base=NO_VERSION, payload=None)
        plan = PackingPlan(entries=tuple(manifest.entries), nbytes=_end(manifest), digest=manifest.plan_digest)
        return self._written(whole, plan, unpack(self._packed(manifest.version), manifest.entries))

    def _written(self, manifest: Manifest, plan: PackingPlan, tensors: Mapping[str, torch.Tensor]) -> Manifest:
        self._sender.wait(manifest.version, self._deadline)
        location = self._sender.write(manifest.version, plan, tensors)
        self._places.written(manifest.version, location)
        self._sender.finish(location)
        return msgspec.structs.replace(manifest, location=location)

    def _packed(self, version: int) -> torch.Tensor:
        packed = self._snapshots.bytes_of(version) if self._snapshots else None
        if packed is None:
            raise DeliveryError(f"version {version} cannot be sent any more: a newer one is acknowledged")
        return packed

    def _beside(self, gpu: torch.device | None) -> AbstractContextManager[Any]:
        """A stream of our own: on the trainer's, a digest would stand behind the steps that are already enqueued."""
        if gpu is None:
            return nullcontext()
        if self._stream is None:
            # Before the trainer's next kernels: engines hear of the version when this is done.
            self._stream = torch.cuda.Stream(gpu, priority=-1)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


def _end(manifest: Manifest) -> int:
    return max(entry.offset + entry.nbytes for entry in manifest.entries)

"""The trainer's end of delivery: the trainer waits only while its weights are copied; the rest runs in the background.

The publisher takes the manifest's digest from the copy that the engines will fetch, not from the trainer's tensors, and
takes it before the version is announced. The place of a version is not overwritten before the version is
`acknowledged`. The newest version can be fetched until there is a newer one, so a late engine can fetch it too. If the
trainer has several ranks, every rank publishes the part that it owns, and rank 0 announces the whole; see `parts`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from headrace.delivery.base import Entry, Kind, Manifest, Part, Score, score_canary
from headrace.delivery.delta import encode, word_bytes_of
from headrace.delivery.digest import digest
from headrace.delivery.parts import TrainerRanks, join_parts, join_resent, owned_shards
from headrace.delivery.plan import PackingPlan, make_plan, pack, plan_of, plan_weights, unpack
from headrace.delivery.transports.base import Enqueuing, PlacedSender, Sender
from headrace.errors import DeliveryError
from headrace.types import NO_VERSION, POLICY, Int32Array

if TYPE_CHECKING:
    from headrace.delivery.kernels import DeviceDigest

PAYLOAD = "delta"
"""A delta travels as one tensor of bytes; this is its name."""


class Publisher:
    """Publishes versions in order through one sender, which it closes. All methods may be called from any thread.

    A trainer with several ranks has one publisher on each of them, and all ranks must make the same calls.
    """

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
        ranks: TrainerRanks | None = None,
    ) -> None:
        """Create a publisher of the weights of `policy`.

        `send` is the kind of manifest. With `"delta"`, a version whose delta would not be smaller is sent in full.
        `base_digest` is the digest of the weights under an adapter. No single wait is longer than `deadline` seconds.
        `ranks` are the ranks of a sharded trainer. Each rank then decides for its own part whether a delta is smaller.
        """
        self._sender = sender
        self._policy = policy
        self._ranks = ranks
        self.announces = ranks is None or torch.distributed.get_rank(ranks.group) == 0
        """Whether the versions of this publisher may be announced: False on all ranks of a trainer but rank 0."""
        self._dtype = dtype
        self._tolerance = tolerance
        self.canary_token_ids = np.asarray(canary_token_ids, np.int32)
        self._send: Kind = send
        self._base_digest = base_digest
        self._deadline = deadline
        self._publishing = threading.Lock()
        self._newest = NO_VERSION
        self._lock = threading.Lock()
        self._locations: dict[int, list[str]] = {}
        """Where engines may still fetch each version. After a resend, a version is at several locations."""
        self._wholes: dict[int, str] = {}
        """With deltas: where versions can be fetched whole."""
        self._part: Part | None = None
        """With several ranks: the part of the newest version that this rank owns."""
        self._acknowledged: set[int] = set()
        self._snapshots = _Snapshots() if send == "delta" else None
        self._finishing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        # Resending needs its own thread. A delta waits in `_finishing` until the previous version is acknowledged,
        # and an engine may acknowledge that version only after it was resent.
        self._resending = ThreadPoolExecutor(max_workers=1, thread_name_prefix="resend")
        self._stream: torch.cuda.Stream | None = None
        self._plan: tuple[Any, PackingPlan] | None = None
        self._on_gpu: dict[str, tuple[int, DeviceDigest]] = {}
        self.last_snapshot_seconds = 0.0
        """How long the last cast and copy took, not counting the wait for a free place and the canary."""

    def publish(
        self,
        version: int,
        parent: int,
        step: int,
        weights: Mapping[str, torch.Tensor],
        canary: Score,
    ) -> Future[Manifest]:
        """Snapshot the weights and score the canary now; the future resolves once the version can be fetched.

        The caller may change its weights after this returns. `canary` gives the log-probabilities of tokens 1..n.
        The manifest of a rank that does not announce describes only this rank's own part. Raises `DeliveryError` if no
        place becomes free before the deadline, or if the version cannot be published, for example because it is not
        newer than the last one or its canary is not finite.
        """
        with self._publishing:
            if version <= self._newest:
                raise DeliveryError(f"version {version} cannot follow version {self._newest}")
            (self._snapshots or self._sender).wait(version, self._deadline)
            scored = score_canary(version, self.canary_token_ids, self._tolerance, canary)
            started = time.monotonic()
            plan = self._planned(weights)
            location = ""
            finish: Callable[[Manifest], Manifest]
            if self._ranks:
                self._part = self._write_part(version, weights, self._ranks)
                finish = partial(self._finish_part, self._part, self._ranks)
            elif self._snapshots:
                self._snapshots.write(version, plan, weights)
                finish = partial(self._finish_delta, plan)
            else:
                location = self._write(version, plan, weights)
                on_gpu = next((tensor.device for tensor in weights.values() if tensor.is_cuda), None)
                finish = partial(self._finish, plan, on_gpu, self._digest_at_once(location, plan, on_gpu))
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
        return self._finishing.submit(finish, manifest)

    def resend(self, manifest: Manifest) -> Future[Manifest]:
        """Offer the same version again with all its weights, for an engine that does not hold the delta's base.

        All such engines fetch from one place, so any number of them may need it. The future resolves to a manifest that
        can be fetched. The version is acknowledged like any other.
        """
        if self._snapshots is None:
            return self._resending.submit(lambda: manifest)
        again = partial(self._resend_part, self._part, self._ranks) if self._ranks else self._resend_whole
        return self._resending.submit(again, manifest)

    def acknowledged(self, version: int) -> None:
        """Record that no engine reads this version any more. Its place is free once a newer one exists. Idempotent."""
        with self._lock:
            self._acknowledged.add(version)
            self._release()
        if self._snapshots:
            self._snapshots.acknowledged(version)

    def close(self) -> None:
        """Finish or cancel the background work and close the sender. Idempotent."""
        if self._snapshots:
            self._snapshots.close()
        for pool in (self._finishing, self._resending):
            # Ranks wait for each other in this work, so none of them may leave it out.
            pool.shutdown(wait=True, cancel_futures=self._ranks is None)
        self._on_gpu.clear()
        self._sender.close()

    def _write(self, version: int, plan: PackingPlan, tensors: Mapping[str, torch.Tensor]) -> str:
        location = self._sender.write(version, plan, tensors)
        with self._lock:
            self._locations.setdefault(version, []).append(location)
            self._release()
        return location

    def _release(self) -> None:
        """Release the places of versions that are acknowledged. Called with the lock."""
        # With deltas, late engines are served from our own snapshots, so no place is kept for them.
        newest = NO_VERSION if self._snapshots else max(self._locations, default=NO_VERSION)
        for version in [v for v in self._locations if v != newest and v in self._acknowledged]:
            for location in self._locations.pop(version):
                self._sender.release(location)
            self._wholes.pop(version, None)
        self._acknowledged &= self._locations.keys()

    def _write_part(self, version: int, weights: Mapping[str, torch.Tensor], ranks: TrainerRanks) -> Part | None:
        tensors, regions = owned_shards(weights, ranks.coordinate)
        if not tensors:
            return None
        plan = plan_weights(tensors, self._dtype)
        starts = [regions[entry.name].start for entry in plan.entries]
        location = ""
        if self._snapshots:
            self._snapshots.write(version, plan, tensors)
        else:
            location = self._write(version, plan, tensors)
        return Part(location=location, entries=list(plan.entries), starts=starts)

    def _finish_part(self, part: Part | None, ranks: TrainerRanks, manifest: Manifest) -> Manifest:
        written: Mapping[str, torch.Tensor] = {}
        base, problem = NO_VERSION, ""
        try:
            if part is not None and self._snapshots:
                written = self._snapshots.snapshot(str(manifest.version), plan_of(part.entries))
                location, payload, base = self._smallest(manifest.version, part.entries)
                part = msgspec.structs.replace(part, location=location, payload=payload)
            elif part is not None:
                self._sender.finish(part.location)
                written = self._sender.snapshot(part.location, plan_of(part.entries))
        except DeliveryError as error:
            problem = str(error)
        join_parts(manifest, part, written, ranks.group, base=base, problem=problem)
        return manifest

    def _finish(
        self, plan: PackingPlan, gpu: torch.device | None, digesting: torch.Tensor | None, manifest: Manifest
    ) -> Manifest:
        self._sender.finish(manifest.location)
        with self._beside(gpu):
            manifest.digest = self._digest(manifest.location, plan, digesting)
        return manifest

    def _planned(self, weights: Mapping[str, torch.Tensor]) -> PackingPlan:
        """Return the plan of these weights; it is made again only if names, dtypes or shapes changed."""
        # Lists, because tuples take three times as long to make and to compare for hundreds of tensors.
        tensors = weights.values()
        layout = list(weights), [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
        if self._plan is None or self._plan[0] != layout:
            self._plan = layout, plan_weights(weights, self._dtype)
        return self._plan[1]

    def _digest_at_once(self, location: str, plan: PackingPlan, gpu: torch.device | None) -> torch.Tensor | None:
        """Enqueue a prepared digest right after an enqueued copy, so that no other process gets the GPU in between."""
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
        # Imported here, because Triton is needed only with a GPU. One digest is prepared for each of the few places.
        from headrace.delivery.kernels import DeviceDigest

        if digesting is None:
            known = self._on_gpu.get(location)
            if known is None or known[0] != plan.digest:
                known = self._on_gpu[location] = plan.digest, DeviceDigest(written)
            digesting = known[1].launch()
        return DeviceDigest.value(digesting)

    def _finish_delta(self, plan: PackingPlan, manifest: Manifest) -> Manifest:
        assert self._snapshots is not None
        manifest.digest = digest(self._snapshots.snapshot(str(manifest.version), plan).items())
        location, payload, base = self._smallest(manifest.version, plan.entries)
        kind: Kind = "full" if payload is None else "delta"
        return msgspec.structs.replace(manifest, kind=kind, location=location, payload=payload, base=base)

    def _smallest(self, version: int, entries: Sequence[Entry]) -> tuple[str, list[Entry] | None, int]:
        """Write what changed since the last version that engines hold, or all bytes if that is not larger.

        Return the location, the tensors there if they are a delta, and the base of the delta.
        """
        assert self._snapshots is not None
        new = self._packed(version)
        base = self._snapshots.base_of(version, self._deadline)
        held = self._snapshots.bytes_of(base) if base != NO_VERSION else None
        changes = encode(held, new, word_bytes_of(entries)) if held is not None else None
        if changes is None:
            return self._whole(version, entries), None, NO_VERSION
        payload = make_plan([(PAYLOAD, "uint8", changes.shape)])
        return self._written(version, payload, {PAYLOAD: changes}), list(payload.entries), base

    def _resend_whole(self, manifest: Manifest) -> Manifest:
        location = self._whole(manifest.version, manifest.entries)
        return msgspec.structs.replace(manifest, kind="full", location=location, payload=None, base=NO_VERSION)

    def _resend_part(self, part: Part | None, ranks: TrainerRanks, manifest: Manifest) -> Manifest:
        problem = ""
        try:
            if part is not None:
                location = self._whole(manifest.version, part.entries)
                part = msgspec.structs.replace(part, location=location)
        except DeliveryError as error:
            problem = str(error)
        return join_resent(manifest, part, ranks.resending, problem)

    def _whole(self, version: int, entries: Sequence[Entry]) -> str:
        """Return where all bytes of a version can be fetched. They are written, unless they are there already."""
        with self._lock:
            known = self._wholes.get(version)
        if known is not None:
            return known
        location = self._written(version, plan_of(entries), unpack(self._packed(version), entries))
        with self._lock:
            if version in self._locations:
                self._wholes[version] = location
        return location

    def _written(self, version: int, plan: PackingPlan, tensors: Mapping[str, torch.Tensor]) -> str:
        self._sender.wait(version, self._deadline)
        location = self._write(version, plan, tensors)
        self._sender.finish(location)
        return location

    def _packed(self, version: int) -> torch.Tensor:
        packed = self._snapshots.bytes_of(version) if self._snapshots else None
        if packed is None:
            raise DeliveryError(f"version {version} cannot be sent any more: a newer one is acknowledged")
        return packed

    def _beside(self, gpu: torch.device | None) -> AbstractContextManager[Any]:
        """Run on a separate stream: on the trainer's stream a digest would wait for training steps already enqueued."""
        if gpu is None:
            return nullcontext()
        if self._stream is None:
            # High priority, ahead of the trainer's next kernels: the version is announced only after the digest.
            self._stream = torch.cuda.Stream(gpu, priority=-1)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


class _Snapshots(PlacedSender):
    """The packed bytes of the last versions: deltas start from them, and late engines get them whole.

    A version holds a place until it is acknowledged. Its bytes are kept until a newer version is acknowledged too; then
    their memory is reused. The location of a snapshot is its version.
    """

    def __init__(self) -> None:
        super().__init__("snapshot", "publisher")
        self._packed: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []
        self._acknowledged = NO_VERSION
        self._lock = threading.Lock()

    def bytes_of(self, version: int) -> torch.Tensor | None:
        """Return the packed bytes of a version; None if they are no longer kept."""
        with self._lock:
            return self._packed.get(version)

    def base_of(self, version: int, timeout: float) -> int:
        """Wait until all versions before this one are acknowledged, and return the newest acknowledged version.

        Engines load one version after the other, so a delta must start from the version that all of them hold. Returns
        `NO_VERSION` if the wait takes longer than `timeout` seconds.
        """
        with self._released:
            done = self._released.wait_for(
                lambda: self._ended or all(holder >= version for holder, _ in self._holders.values()), timeout
            )
            if not done or self._ended:
                return NO_VERSION
        with self._lock:
            return self._acknowledged

    def acknowledged(self, version: int) -> None:
        """Record that all engines hold this version or a newer one. Idempotent."""
        with self._lock:
            if not self._holds(str(version)):
                return
            self._acknowledged = max(self._acknowledged, version)
            self.release(str(version))
            for old in [v for v in self._packed if v < self._acknowledged and not self._holds(str(v))]:
                self._free.append(self._packed.pop(old))

    def close(self) -> None:
        super().close()
        with self._lock:
            self._packed.clear()
            self._free.clear()

    def _choose(self, version: int, nbytes: int, held: Collection[str]) -> str:
        return str(version)

    def _fill(self, location: str, version: int, plan: PackingPlan, weights: Mapping[str, torch.Tensor]) -> None:
        with self._lock:
            self._free = [buffer for buffer in self._free if len(buffer) == plan.nbytes]
            buffer = self._free.pop() if self._free else torch.zeros(plan.nbytes, dtype=torch.uint8)
        pack(buffer, plan.entries, weights)
        with self._lock:
            self._packed[version] = buffer

    def _views(self, location: str, plan: PackingPlan) -> dict[str, torch.Tensor]:
        return unpack(self._packed[int(location)], plan.entries)

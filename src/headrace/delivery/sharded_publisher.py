"""The trainer's end of delivery on several ranks: each rank publishes the part it owns, and rank 0 announces the whole.

Every rank writes its part through its own sender and computes the digest sums of what it wrote. The sums of all parts
give the digest of the whole. The manifest exists only after every part is written. No rank sees another rank's weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from headrace.delivery.base import Kind, Manifest, Part
from headrace.delivery.canary import Score, score_canary
from headrace.delivery.digest import digest_of_sums
from headrace.delivery.digest_sums import Sums, region_block_sums
from headrace.delivery.held_places import HeldPlaces
from headrace.delivery.plan import PackingPlan, plan_weights
from headrace.delivery.regions import Region
from headrace.delivery.shards import owned_shards
from headrace.delivery.transports.base import Sender
from headrace.errors import DeliveryError
from headrace.types import NO_VERSION, POLICY, Int32Array


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """The message with which a rank describes its part to rank 0."""

    version: int
    part: Part | None
    """The part; None if the rank owns nothing."""
    sums: dict[str, bytes]
    """The digest sums of the part, by tensor; see `delivery.digest`."""


class ShardedPublisher:
    """Publishes versions in order. All ranks must make the same calls; only rank 0 gets the manifest from `publish`."""

    def __init__(
        self,
        sender: Sender,
        group: dist.ProcessGroup,
        coordinate: Mapping[str, int],
        dtype: str,
        tolerance: float | None,
        canary_token_ids: Int32Array,
        *,
        send: Kind = "full",
        base_digest: int = 0,
        deadline: float = 120.0,
        policy: str = POLICY,
    ) -> None:
        """Create the publisher of one rank, for the weights of `policy`.

        `group` contains all ranks, works in host memory, and must be used for nothing else. `coordinate` is the
        position of this rank in the grid of ranks, by axis. `send` is the kind of manifest: all weights, or an adapter
        to weights with the digest `base_digest`.
        """
        self._sender = sender
        self._policy = policy
        self._group = group
        self._coordinate = coordinate
        self._dtype = dtype
        self._tolerance = tolerance
        self.canary_token_ids = np.asarray(canary_token_ids, np.int32)
        """The token ids that are scored for every version."""
        self._send: Kind = send
        self._base_digest = base_digest
        self._deadline = deadline
        self._newest = NO_VERSION
        self._places = HeldPlaces(sender, keep_newest=True)
        self._parts = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self.last_snapshot_seconds = 0.0
        """How long the last cast and copy took, not counting the wait for a free place and the canary."""

    def publish(
        self,
        version: int,
        parent: int,
        step: int,
        weights: Mapping[str, torch.Tensor],
        canary: Score,
    ) -> Future[Manifest | None]:
        """Snapshot this rank's part and score the canary together with the other ranks.

        The future resolves to the manifest on rank 0 and to None on all other ranks. See `Publisher.publish`.
        """
        if version <= self._newest:
            raise DeliveryError(f"version {version} cannot follow version {self._newest}")
        self._sender.wait(version, self._deadline)
        scored = score_canary(version, self.canary_token_ids, self._tolerance, canary)
        started = time.monotonic()
        whole = plan_weights(weights, self._dtype)
        tensors, regions = owned_shards(weights, self._coordinate)
        plan = plan_weights(tensors, self._dtype) if tensors else None
        location = self._sender.write(version, plan, tensors) if plan else ""
        self.last_snapshot_seconds = time.monotonic() - started
        self._newest = version
        if location:
            self._places.written(version, location)
        manifest = Manifest(
            version=version,
            policy=self._policy,
            parent=parent,
            step=step,
            transport=self._sender.name,
            location="",
            entries=list(whole.entries),
            plan_digest=whole.digest,
            digest=0,
            canary=scored,
            kind=self._send,
            base_digest=self._base_digest,
        )
        return self._parts.submit(self._finish, manifest, plan, location, regions)

    def acknowledged(self, version: int) -> None:
        """Record that no engine reads this version any more. Idempotent.

        The place of this rank's part becomes free once there is a newer version.
        """
        self._places.acknowledged(version)

    def resend(self, manifest: Manifest) -> Future[Manifest]:
        """Resolve to the same manifest: it has all weights, and can be fetched until there is a newer version."""
        done: Future[Manifest] = Future()
        done.set_result(manifest)
        return done

    def close(self) -> None:
        """Finish or cancel the background work and close the sender. Idempotent."""
        self._parts.shutdown(wait=True, cancel_futures=True)
        self._sender.close()

    def _finish(
        self, manifest: Manifest, plan: PackingPlan | None, location: str, regions: Mapping[str, Region]
    ) -> Manifest | None:
        part: Part | None = None
        sums: dict[str, bytes] = {}
        if plan is not None:
            self._sender.finish(location)
            full = {entry.name: entry.shape for entry in manifest.entries}
            snapshot = self._sender.snapshot(location, plan)
            sums = {
                name: region_block_sums(tensor, full[name], regions[name].start).tobytes()
                for name, tensor in snapshot.items()
            }
            starts = [regions[entry.name].start for entry in plan.entries]
            part = Part(location=location, entries=list(plan.entries), starts=starts)
        told = _gather(_Written(version=manifest.version, part=part, sums=sums), self._group)
        if not told:
            return None
        if any(one.version != manifest.version for one in told):
            raise DeliveryError(f"ranks publish different versions: {sorted({one.version for one in told})}")
        manifest.parts = [one.part for one in told if one.part is not None]
        manifest.digest = _digest(manifest, told)
        return manifest


def _digest(manifest: Manifest, told: list[_Written]) -> int:
    """Return the digest of the whole tensors from the sums of their parts, which are added with wrap-around."""
    found: dict[tuple[str, str], Sums] = {}
    for entry in manifest.entries:
        parts = [np.frombuffer(one.sums[entry.name], np.int32) for one in told if entry.name in one.sums]
        found[entry.name, entry.dtype] = np.sum(parts, axis=0, dtype=np.int32)
    return digest_of_sums(found)


def _gather(mine: _Written, group: dist.ProcessGroup) -> list[_Written]:
    """Return the messages of all ranks on rank 0, and nothing on other ranks. Uses msgspec, so no pickle is sent."""
    text = torch.frombuffer(bytearray(msgspec.msgpack.encode(mine)), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.nn.functional.pad(text, (0, longest - len(text)))
    first = dist.get_rank(group) == 0
    texts = [torch.empty_like(padded) for _ in lengths] if first else None
    dist.gather(padded, texts, group=group, group_dst=0)
    return [
        msgspec.msgpack.decode(bytes(text[: int(length)].tolist()), type=_Written)
        for text, length in zip(texts or (), lengths, strict=False)
    ]

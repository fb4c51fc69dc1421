"""A version in parts: each rank of a trainer publishes the regions that it owns, and an engine assembles all parts.

Every rank writes its part through its own sender and computes the digest sums of what it wrote. The sums of all parts
give the digest of the whole. Rank 0 completes the manifest after every part is written. No rank sees another rank's
weights. An engine checks each part against its own place before and after it reads the part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from headrace.delivery.base import Manifest, Part
from headrace.delivery.digest import digest_of_sums
from headrace.delivery.digest_sums import Sums, region_block_sums
from headrace.delivery.plan import dtype_of
from headrace.delivery.regions import Region, plan_copies
from headrace.delivery.shards import copy_piece
from headrace.delivery.transports.base import Source
from headrace.errors import DeliveryError


class TrainerRanks(NamedTuple):
    """The ranks of a trainer, as their publishers see them."""

    group: dist.ProcessGroup
    """A group of all ranks that works in host memory and is used for nothing else."""
    coordinate: Mapping[str, int]
    """The position of this rank in the grid of ranks, by axis."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which announces versions."""
        return dist.get_rank(self.group) == 0


class _Written(msgspec.Struct, frozen=True, kw_only=True):
    """The message with which a rank describes its part to rank 0."""

    version: int
    part: Part | None
    """The part; None if the rank owns nothing."""
    sums: dict[str, bytes]
    """The digest sums of the part, by tensor; see `delivery.digest`."""


def join_parts(
    manifest: Manifest, part: Part | None, written: Mapping[str, torch.Tensor], group: dist.ProcessGroup
) -> None:
    """Complete the manifest on rank 0, together with all other ranks; on these it gets this rank's own part only.

    `written` are the tensors of this rank's part, as they were written.
    """
    full = {entry.name: entry.shape for entry in manifest.entries}
    regions = part_regions(part) if part is not None else {}
    sums = {
        name: region_block_sums(tensor, full[name], regions[name].start).tobytes() for name, tensor in written.items()
    }
    mine = _Written(version=manifest.version, part=part, sums=sums)
    told = _gather(mine, group)
    if any(one.version != manifest.version for one in told):
        raise DeliveryError(f"ranks publish different versions: {sorted({one.version for one in told})}")
    manifest.parts = [one.part for one in told or [mine] if one.part is not None]
    if told:
        manifest.digest = _digest(manifest, told)


def part_regions(part: Part) -> dict[str, Region]:
    """Return the region of the whole tensor that each tensor of a part is."""
    return {entry.name: Region(start, entry.shape) for entry, start in zip(part.entries, part.starts, strict=True)}


def fetch_parts(
    source: Source, manifest: Manifest, targets: Mapping[str, torch.Tensor], wanted: Mapping[str, Region]
) -> None:
    """Fill the targets, which are the wanted regions of the manifest's tensors. The caller checks the whole digest.

    Raises `DeliveryError` unless the parts hold every wanted element exactly once and do not change while being read.
    """
    for entry in manifest.entries:
        if entry.name in targets and targets[entry.name].dtype != dtype_of(entry.dtype):
            raise DeliveryError(f"{entry.name} is published as {entry.dtype}, not {targets[entry.name].dtype}")
    held = [part_regions(part) for part in manifest.parts]
    # Planned before a byte is read, because the manifest alone shows whether an element is missing.
    copies = plan_copies(held, wanted)
    for number, part in enumerate(manifest.parts):
        # One part at a time, because a source may use the same memory for the next part.
        tensors = source.open(part.location, manifest.version, part.entries)
        for copy in copies:
            if copy.part == number:
                copy_piece(copy, tensors[copy.name], held[number][copy.name], targets[copy.name], wanted[copy.name])
        source.verify(part.location, manifest.version)


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
        msgspec.msgpack.decode(text.numpy()[: int(length)].tobytes(), type=_Written)
        for text, length in zip(texts or (), lengths, strict=False)
    ]

"""An engine assembles a version that several ranks published in parts into whole tensors, or into slices of them.

Each part is checked against its own place before and after it is read. The caller checks the digest of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from headrace.delivery.base import Manifest, Part
from headrace.delivery.plan import dtype_of
from headrace.delivery.regions import Region, plan_copies
from headrace.delivery.shards import copy_piece
from headrace.delivery.transports.base import Source
from headrace.errors import DeliveryError


def part_regions(part: Part) -> dict[str, Region]:
    """Return the region of the whole tensor that each tensor of a part is."""
    return {entry.name: Region(start, entry.shape) for entry, start in zip(part.entries, part.starts, strict=True)}


def fetch_parts(
    source: Source, manifest: Manifest, targets: Mapping[str, torch.Tensor], wanted: Mapping[str, Region]
) -> None:
    """Fill the targets, which are the wanted regions of the manifest's tensors.

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

"""Versions that become live in another form than they arrive in, such as rounded weights.

The digest of a version proves what arrived. The tensors in the other form are made from that, beside the live weights,
and have a digest of their own, which is what the live weights must have after the swap.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from headrace.delivery.digest_sums import MASK
from headrace.delivery.plan import PackingPlan, Views, dtype_name, make_plan


class Conversion(Protocol):
    """How the tensors of a version become the tensors that an engine serves: a function of the version alone."""

    @property
    def arriving(self) -> Mapping[str, torch.Tensor]:
        """The tensors of a version by name: shapes and dtypes, without values (on the device `meta`)."""

    def convert(self, arrived: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor]) -> None:
        """Write the converted version into tensors like the live ones. `arrived`, on any device, is only read."""


@dataclass(frozen=True, eq=False)
class Converted:
    """A version in the form in which it becomes live."""

    weights: Mapping[str, torch.Tensor]
    plan: PackingPlan
    arrived: int
    """The digest of the version as it arrived."""
    digest: int
    """The digest of the converted weights."""

    def as_published(self, live: int) -> int:
        """Return the version's own digest if the live weights have the digest of the converted ones, else another.

        So a digest of live weights can be compared with the published one, whatever form they are in.
        """
        return (live - self.digest + self.arrived) & MASK


class Converter:
    """Converts versions into memory of its own, which is laid out like the live tensors. Used by one thread."""

    def __init__(self, conversion: Conversion, live: Mapping[str, torch.Tensor]) -> None:
        self.arriving = conversion.arriving
        self._convert = conversion.convert
        self._device = next(iter(live.values())).device
        self.plan = make_plan((name, dtype_name(tensor.dtype), tensor.shape) for name, tensor in live.items())
        """The plan of the live tensors."""
        self._memory: Views | None = None

    @property
    def packed(self) -> torch.Tensor | None:
        """The memory of the last converted version."""
        return self._memory.packed if self._memory is not None else None

    def converted(self, arrived: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the version in the form of the live weights. It is overwritten by the next one."""
        if self._memory is None:
            self._memory = Views(torch.empty(self.plan.nbytes, dtype=torch.uint8, device=self._device))
        weights = self._memory.of(self.plan.entries)
        self._convert(arrived, weights)
        return weights

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._memory = None

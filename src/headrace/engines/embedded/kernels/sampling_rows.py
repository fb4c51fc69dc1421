"""The sampling parameters of every row, stored on the device for the kernels of `sampling`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from headrace.engines.base import FORBIDDEN_LIMIT, Sampling


class PackedRows(NamedTuple):
    """Sampling parameters in host memory, ready for `SamplingRows.set`."""

    reals: torch.Tensor
    """[n, 3] float64: temperature, top_p, min_p."""
    wholes: torch.Tensor
    """[n, 3 + FORBIDDEN_LIMIT] int64: seed, top_k, record, then forbidden ids padded with -1."""


class SamplingRows:
    """The sampling parameters of every device row. A new row is greedy."""

    def __init__(self, rows: int, device: torch.device | str) -> None:
        self._pin = torch.device(device).type == "cuda"
        greedy = self.pack([Sampling(max_tokens=1, temperature=0.0)])
        self.reals = greedy.reals.to(device).repeat(rows, 1)
        self.wholes = greedy.wholes.to(device).repeat(rows, 1)

    def pack(self, samplings: Sequence[Sampling]) -> PackedRows:
        """Pack these settings for `set`, in pinned memory if the rows are on a GPU."""
        reals = torch.tensor([(s.temperature, s.top_p, s.min_p) for s in samplings], dtype=torch.float64)
        wholes = torch.tensor([_wholes(s) for s in samplings], dtype=torch.int64)
        return PackedRows(reals.pin_memory(), wholes.pin_memory()) if self._pin else PackedRows(reals, wholes)

    def set(self, rows: torch.Tensor, packed: PackedRows) -> None:
        """Write parameters to `rows` (int64) on the current stream. Later launches see them, earlier ones do not."""
        index = rows.to(self.reals.device, non_blocking=True)
        self.reals.index_copy_(0, index, packed.reals.to(index.device, non_blocking=True))
        self.wholes.index_copy_(0, index, packed.wholes.to(index.device, non_blocking=True))


def _wholes(sampling: Sampling) -> list[int]:
    seed = (sampling.seed + (1 << 63)) % (1 << 64) - (1 << 63)
    # An id that is in no vocabulary forbids nothing.
    forbidden = [token for token in sampling.forbidden if 0 <= token < 1 << 31]
    padding = [-1] * (FORBIDDEN_LIMIT - len(forbidden))
    return [seed, min(sampling.top_k, 1 << 31), int(sampling.record_kept), *forbidden, *padding]

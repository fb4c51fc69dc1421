"""The packed bytes of a version cut into buckets of whole rows: pure arithmetic.

An engine without a second copy of its weights fetches a bucket, copies the bucket's rows over the rows of its live
tensors, and uses the memory of the bucket again. Every element of every tensor is in exactly one bucket.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from headrace.delivery.base import Entry
from headrace.delivery.plan import ALIGNMENT, dtype_of

BUCKET_BYTES = 64 << 20
"""The size of a bucket: so large that the cost of a bucket does not matter, and small beside a large model."""


class Rows(NamedTuple):
    """Rows of one tensor, and where their packed bytes are. A row is an index of the tensor's first dimension."""

    entry: Entry
    first: int
    last: int
    """The row after the last one (exclusive). A tensor without dimensions has one row."""
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows of a tensor that has the entry's shape."""
        return tensor[self.first : self.last] if tensor.ndim else tensor


class Bucket(NamedTuple):
    """Packed bytes that are fetched together."""

    rows: list[Rows]
    start: int
    stop: int

    def unpack(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the bucket's bytes (flat, uint8), one tensor for each tensor that has rows in the bucket."""
        found = {}
        for rows in self.rows:
            values = packed[rows.start - self.start : rows.stop - self.start].view(dtype_of(rows.entry.dtype))
            shape = (rows.last - rows.first, *rows.entry.shape[1:]) if rows.entry.shape else ()
            found[rows.entry.name] = values.view(shape)
        return found

    def targets(self, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the rows of the live tensors that this bucket holds, by name."""
        return {rows.entry.name: rows.of(live[rows.entry.name]) for rows in self.rows}


def cut(entries: Iterable[Entry], nbytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Cut packed tensors into buckets of about `nbytes`, in byte order. A longer row gets a bucket of its own."""
    buckets: list[Bucket] = []
    for entry in sorted(entries, key=lambda entry: entry.offset):
        for rows in _rows(entry, nbytes):
            last = buckets[-1] if buckets else None
            if last is not None and rows.stop - last.start <= nbytes:
                last.rows.append(rows)
                buckets[-1] = last._replace(stop=rows.stop)
            else:
                # The start is rounded down, so that every tensor in the bucket is aligned as in the packed bytes.
                buckets.append(Bucket([rows], rows.start // ALIGNMENT * ALIGNMENT, rows.stop))
    return buckets


def _rows(entry: Entry, nbytes: int) -> Iterator[Rows]:
    if not entry.nbytes:
        return
    count = entry.shape[0] if entry.shape else 1
    row = entry.nbytes // count
    step = max(1, nbytes // row)
    for first in range(0, count, step):
        last = min(count, first + step)
        yield Rows(entry, first, last, entry.offset + first * row, entry.offset + last * row)

"""Measures how much of the memory's bandwidth the decode kernel reaches, by kernel shape.

    python benchmarks/attention.py

For each workload, the script prints one line for each shape of the kernel (block size, tile, warps, stages, splits),
the fastest first. A line has the time of a launch in a replayed CUDA graph, the bytes of keys and values per second,
and these as a fraction of the bandwidth of a plain copy. The KV cache of every workload is several times larger than
the L2 cache of the GPU. After 50 seconds the script tries no more shapes, and says how many it left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_timing import gpu_seconds

from headrace.engines.embedded.kernels.attention import choose_splits, choose_tile, paged_decode
from headrace.models.attention import AttentionCall

SECONDS = 50.0
REPEATS = 10


@dataclass(frozen=True)
class Workload:
    """A decode step that computes one new token for each of `batch` sequences of this length."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    length: int

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values (bfloat16) that the step must read."""
        return self.batch * self.length * self.kv_heads * self.size * 2 * 2


@dataclass(frozen=True)
class Shape:
    """The parameters with which the kernel is launched."""

    block_size: int
    tile: int
    num_warps: int
    num_stages: int
    splits: int


WORKLOADS = (
    Workload(256, 16, 8, 128, 320),
    Workload(1024, 9, 3, 64, 320),
    Workload(8, 32, 8, 128, 8000),
)


def shapes(workload: Workload, processors: int) -> Iterator[Shape]:
    """Yield the default shape first, then shapes that differ from it in one or two parameters."""
    splits = choose_splits(workload.batch, workload.kv_heads, processors)
    tile = choose_tile(workload.size, 2)
    tried = [(tile, 4, 3), (tile, 4, 4), (tile, 4, 2), (tile // 2, 4, 4), (tile // 2, 2, 4), (tile * 2, 4, 3)]
    for block_size in (16, 64, 128):
        for some_tile, warps, stages in tried[: 2 if block_size == 128 else None]:
            yield Shape(block_size, some_tile, warps, stages, splits)
    for other in {max(1, splits // 2), splits * 2, splits * 4} - {splits}:
        yield Shape(16, tile, 4, 3, other)


def decode_call(workload: Workload, block_size: int) -> Callable[[Shape], Callable[[], object]]:
    """Return a function from a kernel shape to a call that launches this workload in that shape.

    All calls read one cache, whose blocks are in random order.
    """
    blocks_each = -(-workload.length // block_size)
    total = workload.batch * blocks_each
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    keys, values = (torch.randn(total, workload.kv_heads, block_size, workload.size, **options) for _ in range(2))
    tables = torch.randperm(total, device="cuda").int().view(workload.batch, blocks_each)
    rows = torch.arange(workload.batch, device="cuda", dtype=torch.int32)
    positions = torch.full_like(rows, workload.length - 1)
    heads = (workload.heads, workload.kv_heads, workload.kv_heads)
    query, key, value = (
        torch.randn(workload.batch, count, workload.size, **options).transpose(0, 1)[None] for count in heads
    )
    call = AttentionCall(0, query, key, value, workload.size**-0.5, window=None, softcap=None, sinks=None)

    def shaped(shape: Shape) -> Callable[[], object]:
        return lambda: paged_decode(
            *(call, keys, values, tables, rows, positions),
            splits=shape.splits,
            tile=shape.tile,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    return shaped


def copy_bandwidth() -> float:
    """Return the bytes per second, reads and writes counted, of a large copy."""
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / gpu_seconds(lambda: target.copy_(source), replayed=REPEATS)


def measure(workload: Workload, processors: int, deadline: float) -> tuple[list[tuple[float, Shape]], int]:
    """Return the seconds of every shape that was tried, the default first, and the number of shapes left out.

    No shape but the first is tried after the deadline.
    """
    found: list[tuple[float, Shape]] = []
    skipped = 0
    calls: dict[int, Callable[[Shape], Callable[[], object]]] = {}
    for shape in shapes(workload, processors):
        if found and time.monotonic() > deadline:
            skipped += 1
            continue
        if shape.block_size not in calls:
            calls[shape.block_size] = decode_call(workload, shape.block_size)
        found.append((gpu_seconds(calls[shape.block_size](shape), replayed=REPEATS), shape))
    return found, skipped


def main() -> None:
    """Print a table for each workload."""
    started = time.monotonic()
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} TB/s")
    for number, workload in enumerate(WORKLOADS, 1):
        found, skipped = measure(workload, processors, started + SECONDS * number / len(WORKLOADS))
        default = found[0][1]
        print(f"\n{workload}, {workload.nbytes / 1e6:.0f} MB" + (f", {skipped} shapes not tried" if skipped else ""))
        for took, shape in sorted(found, key=lambda pair: pair[0]):
            rate = workload.nbytes / took
            mark = "  (default)" if shape == default else ""
            print(f"  {took * 1e6:7.1f} us  {rate / 1e12:.2f} TB/s  {rate / bandwidth:.2f} of copy  {shape}{mark}")


if __name__ == "__main__":
    main()

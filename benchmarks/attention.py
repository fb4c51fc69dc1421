"""How much of the memory's bandwidth the decode kernel reaches, by kernel shape.

    python benchmarks/attention.py

For each workload, one line per shape of the kernel (block size, tile, warps, stages, splits), the best first: time of a
launch in a replayed CUDA graph, bytes of keys and values over it, and that as a fraction of a plain copy's bandwidth,
measured first. Every workload's cache is several times the chip's second-level cache. Stops trying shapes after 50
seconds, and says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from headrace.engines.embedded.kernels.decode import choose_splits, choose_tile, launch_decode

SECONDS = 50.0
REPEATS = 10


@dataclass(frozen=True)
class Workload:
    """One new token for each of `batch` sequences of this length."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    length: int

    @property
    def nbytes(self) -> int:
        """Keys and values that have to be read, bf16."""
        return self.batch * self.length * self.kv_heads * self.size * 2 * 2


@dataclass(frozen=True)
class Shape:
    """How the kernel is launched."""

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
    """The default first, then what differs from it in one or two ways."""
    splits = choose_splits(workload.batch, workload.kv_heads, processors)
    tile = choose_tile(workload.size, 2)
    tried = [(tile, 4, 3), (tile, 4, 4), (tile, 4, 2), (tile // 2, 4, 4), (tile // 2, 2, 4), (tile * 2, 4, 3)]
    for block_size in (16, 64, 128):
        for some_tile, warps, stages in tried[: 2 if block_size == 128 else None]:
            yield Shape(block_size, some_tile, warps, stages, splits)
    for other in {max(1, splits // 2), splits * 2, splits * 4} - {splits}:
        yield Shape(16, tile, 4, 3, other)


def seconds(call: Callable[[], object]) -> float:
    """Of one call, the median over replays of a graph of ten."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / REPEATS)
    return statistics.median(times)


def decode_call(workload: Workload, block_size: int) -> Callable[[Shape], Callable[[], object]]:
    """What launches this workload in a given shape, over one cache of scattered blocks."""
    blocks_each = -(-workload.length // block_size)
    total = workload.batch * blocks_each
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    keys, values = (torch.randn(total, workload.kv_heads, block_size, workload.size, **options) for _ in range(2))
    tables = torch.randperm(total, device="cuda").int().view(workload.batch, blocks_each)
    rows = torch.arange(workload.batch, device="cuda", dtype=torch.int32)
    positions = torch.full_like(rows, workload.length - 1)
    query = torch.randn(workload.batch, workload.heads, workload.size, **options)
    key, value = (torch.randn(workload.batch, workload.kv_heads, workload.size, **options) for _ in range(2))

    def shaped(shape: Shape) -> Callable[[], object]:
        return lambda: launch_decode(
            *(query, key, value, keys, values, tables, rows, positions),
            scaling=workload.size**-0.5,
            window=None,
            softcap=None,
            sinks=None,
            splits=shape.splits,
            tile=shape.tile,
            num_warps=shape.num_warps,
            num_stages=shape.num_stages,
        )

    return shaped


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.ones(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def measure(workload: Workload, processors: int, deadline: float) -> tuple[list[tuple[float, Shape]], int]:
    """Seconds of every shape tried before the deadline, the default's first, and how many were not."""
    found: list[tuple[float, Shape]] = []
    skipped = 0
    calls: dict[int, Callable[[Shape], Callable[[], object]]] = {}
    for shape in shapes(workload, processors):
        if found and time.monotonic() > deadline:
            skipped += 1
            continue
        if shape.block_size not in calls:
            calls[shape.block_size] = decode_call(workload, shape.block_size)
        found.append((seconds(calls[shape.block_size](shape)), shape))
    return found, skipped


def main() -> None:
    """Print a table per workload."""
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

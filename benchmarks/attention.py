"""Measures how much of the memory's bandwidth the decode kernel reaches: `python benchmarks/attention.py`.

For each workload, the script prints the time of a launch in a replayed CUDA graph, the bytes of keys and values per
second, and these as a fraction of the bandwidth of a plain copy. The KV cache of every workload is several times larger
than the L2 cache of the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.bench.base import copy_bandwidth
from headrace.bench.timing import gpu_seconds
from headrace.engines.embedded.kernels.attention import choose_splits, paged_decode
from headrace.models.attention import AttentionCall

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """A decode step that computes one new token for each of `batch` sequences of this length."""

    batch: int
    heads: int
    kv_heads: int
    size: int
    length: int


WORKLOADS = (
    Workload(256, 16, 8, 128, 320),
    Workload(1024, 9, 3, 64, 320),
    Workload(8, 32, 8, 128, 8000),
)


def measure(work: Workload, splits: int) -> float:
    """Return the seconds of a launch. The blocks of the cache are in random order."""
    blocks_each = -(-work.length // BLOCK_SIZE)
    total = work.batch * blocks_each
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    keys, values = (torch.randn(total, work.kv_heads, BLOCK_SIZE, work.size, **options) for _ in range(2))
    tables = torch.randperm(total, device="cuda").int().view(work.batch, blocks_each)
    rows = torch.arange(work.batch, device="cuda", dtype=torch.int32)
    positions = torch.full_like(rows, work.length - 1)
    heads = (work.heads, work.kv_heads, work.kv_heads)
    query, key, value = (torch.randn(work.batch, count, work.size, **options).transpose(0, 1)[None] for count in heads)
    call = AttentionCall(0, query, key, value, work.size**-0.5, window=None, softcap=None, sinks=None)

    def launch() -> None:
        paged_decode(call, keys, values, tables, rows, positions, splits=splits)

    return gpu_seconds(launch, replayed=10)


def main() -> None:
    """Print a line for each workload."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    bandwidth = copy_bandwidth("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} TB/s")
    for work in WORKLOADS:
        splits = choose_splits(work.batch, work.kv_heads, processors)
        seconds = measure(work, splits)
        # Keys and values are in bfloat16.
        rate = work.batch * work.length * work.kv_heads * work.size * 2 * 2 / seconds
        print(
            f"{work}, {splits} splits: {seconds * 1e6:.1f} us, {rate / 1e12:.2f} TB/s, {rate / bandwidth:.2f} of copy"
        )


if __name__ == "__main__":
    main()

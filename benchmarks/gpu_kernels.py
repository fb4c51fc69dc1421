"""Measures the kernels of a GPU alone: `python benchmarks/gpu_kernels.py [attention] [sampling] [digest] [packed]`.

Times are medians by the clock of the GPU. Launches of attention and sampling are replayed as a CUDA graph.

- `attention`: a launch of the decode kernel, the bytes of keys and values that it reads per second, and these as a
  fraction of the bandwidth of a plain copy. The KV cache is several times larger than the L2 cache of the GPU.
- `sampling`: the milliseconds to sample the tokens of one step from bfloat16 logits, flat (scale 1) and peaked (scale
  5), beside the time to read the logits once, to find their maximum.
- `digest`: the digest of 600M bfloat16 elements in 300 tensors, beside copies of the same bytes. `copy` is the copy
  that a receiver makes over live weights. `torch` is the same copy by torch. `flat copy` is the copy of one tensor
  with all bytes.
- `packed`: the trainer's attention over a packed row, forward and backward, by Headrace's joined calls of torch's
  variable-length kernels and by torch's FlexAttention, and what each plans once for a row.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from headrace.bench.base import copy_bandwidth
from headrace.delivery.digest import digest
from headrace.delivery.kernels import DeviceCopy, DeviceDigest
from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.embedded.kernels.attention import choose_splits, paged_decode
from headrace.engines.embedded.kernels.sampling import SamplingRows, sample
from headrace.models.attention import AttentionCall
from headrace.training.attention import PackedAttention
from headrace.training.rows import MicroBatch, Segment

BLOCK_SIZE = 16


class Workload(NamedTuple):
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
SIZES = ((256, 151936), (1024, 49152))
RULES: dict[str, dict[str, object]] = {
    "plain": {},
    "no rule, filtered": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
    "record": {"record_kept": True},
}
ELEMENTS, TENSORS, COLUMNS = 600_000_000, 300, 1024

PACKED_HEADS, PACKED_KV_HEADS, PACKED_SIZE = 16, 8, 128
PACKED_ROWS = {
    "8 sequences of 4,096": [(0, [4096])] * 8,
    "12 prompts of 512 with 8 answers each": [(512, [96, 128, 192, 224, 256, 288, 384, 640])] * 12,
    "32 prompts of 64 with 8 answers each": [(64, [32, 64, 64, 96, 128, 128, 192, 256])] * 32,
}
"""A row -> for each prompt its length, 0 if nothing is shared, and the lengths of its answers."""


def gpu_seconds(work: Callable[[], object], *, replayed: int = 0, runs: int = 7) -> float:
    """Return the median seconds of one call of the work, by the clock of the GPU. A first call is not counted.

    With `replayed`, a run is the replay of a CUDA graph of this many calls, so that the host's launches take no part.
    """
    work()
    torch.cuda.synchronize()
    run = work
    if replayed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(replayed):
                work()
        run = graph.replay
    times = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1000 / (replayed or 1))
    return statistics.median(times)


def attention_seconds(work: Workload, splits: int) -> float:
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


def measure_attention() -> None:
    """Print a line for each workload."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    bandwidth = copy_bandwidth("cuda")
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    for work in WORKLOADS:
        splits = choose_splits(work.batch, work.kv_heads, processors)
        seconds = attention_seconds(work, splits)
        # Keys and values are in bfloat16.
        rate = work.batch * work.length * work.kv_heads * work.size * 2 * 2 / seconds
        print(
            f"{work}, {splits} splits: {seconds * 1e6:.1f} us, {rate / 1e12:.2f} TB/s, {rate / bandwidth:.2f} of copy"
        )


def _sample_step(batch: int, vocabulary: int, scale: float) -> None:
    logits = (torch.randn(batch, vocabulary, device="cuda") * scale).bfloat16()
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    ids = torch.empty(batch, KEPT_LIMIT, dtype=torch.int32, device="cuda")
    counts = torch.empty(batch, dtype=torch.int32, device="cuda")
    print(f"batch {batch}, vocabulary {vocabulary}, scale {scale}")
    print(f"  {'one read (amax)':24} {1e3 * gpu_seconds(lambda: logits.amax(-1), replayed=20):7.3f} ms")
    for name, rule in RULES.items():
        params = SamplingRows(batch, "cuda")
        samplings = [Sampling(max_tokens=1, seed=i, **rule) for i in range(batch)]  # type: ignore[arg-type]
        params.set(torch.arange(batch), samplings)

        def step(params: SamplingRows = params, plain: bool = name == "plain", record: bool = name == "record") -> None:
            recorders = {"kept_ids": ids, "kept_counts": counts} if record else {}
            sample(logits, rows, rows, params, filtered=not plain, **recorders)

        print(f"  {name:24} {1e3 * gpu_seconds(step, replayed=20):7.3f} ms")


def measure_sampling() -> None:
    """Measure all sizes, flat and peaked."""
    torch.manual_seed(0)
    for batch, vocabulary in SIZES:
        for scale in (1.0, 5.0):
            _sample_step(batch, vocabulary, scale)


def measure_digest() -> None:
    """Print the milliseconds of the digest and of each copy."""
    # Matrices of different sizes and as many small vectors, as in a model.
    rows, weights = 2 * ELEMENTS // (COLUMNS * TENSORS), {}
    for i in range(TENSORS // 2):
        share = rows // 2 if i % 2 else rows + rows // 2
        weights[f"layers.{i}.weight"] = torch.randn(share, COLUMNS, device="cuda", dtype=torch.bfloat16)
        weights[f"layers.{i}.norm"] = torch.ones(COLUMNS, device="cuda", dtype=torch.bfloat16)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    few = {name: weights[name] for name in list(weights)[:4]}
    if digest(few.items()) != digest((name, tensor.cpu()) for name, tensor in few.items()):
        raise SystemExit("the digests of CPU and GPU differ")
    targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    flat_target = torch.empty_like(flat)
    works = {
        "digest": DeviceDigest(weights).launch,
        "copy": DeviceCopy(targets, weights).launch,
        "torch": lambda: torch._foreach_copy_(list(targets.values()), list(weights.values())),
        "flat copy": lambda: flat_target.copy_(flat),
    }
    print(f"{nbytes / 1e9:.2f} GB in {len(weights)} tensors")
    for name, work in works.items():
        seconds = gpu_seconds(work, runs=20)
        moved = nbytes if name == "digest" else 2 * nbytes
        print(f"{name} {1e3 * seconds:.3f} ms, {moved / seconds / 1e12:.2f} TB/s read and written")


def packed_row(families: list[tuple[int, list[int]]]) -> MicroBatch:
    """Return a row of these families. Only its segments and positions matter to attention."""
    segments: list[Segment] = []
    positions: list[int] = []

    def add(length: int, prefix: int | None) -> None:
        segments.append(Segment(len(positions), length, prefix))
        first = 0 if prefix is None else segments[prefix].length
        positions.extend(range(first, first + length))

    for shared, answers in families:
        prompt = len(segments) if shared else None
        if shared:
            add(shared, None)
        for length in answers:
            add(length, prompt)
    none = np.zeros(0, dtype=np.int64)
    return MicroBatch(
        np.zeros(len(positions), dtype=np.int64), np.array(positions), tuple(segments), none, none, none, none
    )


def measure_packed_row(row: MicroBatch, compiled: Callable[..., torch.Tensor]) -> None:
    """Print the milliseconds of one layer and of the plan of the row, and how far the two outputs are apart."""
    counts, shape = (PACKED_HEADS, PACKED_KV_HEADS, PACKED_KV_HEADS), (len(row), PACKED_SIZE)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    inputs = [torch.randn(1, count, *shape, **options).requires_grad_() for count in counts]
    gradient = torch.randn(1, len(row), PACKED_HEADS, PACKED_SIZE, **options)
    call = AttentionCall(0, *inputs, PACKED_SIZE**-0.5, window=None, softcap=None, sinks=None)
    lengths = torch.tensor([segment.length for segment in row.segments])
    segment_of = torch.arange(len(lengths)).repeat_interleave(lengths).cuda()
    prefixes = torch.tensor([-1 if s.prefix is None else s.prefix for s in row.segments])
    prefix_of = prefixes.repeat_interleave(lengths).cuda()

    def sees(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = (segment_of[query] == segment_of[key]) & (query >= key)
        return own | (prefix_of[query] == segment_of[key])

    def plan_ours() -> Any:
        return PackedAttention(row)

    def plan_flex() -> Any:
        return create_block_mask(sees, None, None, len(row), len(row), device="cuda", _compile=True)

    def ours(plan: Any) -> torch.Tensor:
        return plan.attend(call)  # type: ignore[no-any-return]

    def flex(plan: Any) -> torch.Tensor:
        output = compiled(*inputs, block_mask=plan, scale=PACKED_SIZE**-0.5, enable_gqa=True)
        return output.transpose(1, 2)

    def timed(work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    outputs = []
    for name, plan, attend in (("headrace", plan_ours, ours), ("flex", plan_flex, flex)):
        first = timed(lambda plan=plan, attend=attend: attend(plan()).backward(gradient))
        planning, planned = timed(plan), plan()
        outputs.append(attend(planned).detach().float())
        forward = gpu_seconds(lambda attend=attend, planned=planned: attend(planned))
        both = gpu_seconds(lambda attend=attend, planned=planned: attend(planned).backward(gradient))
        print(
            f"  {name:9} forward {1e3 * forward:.2f} ms, with backward {1e3 * both:.2f} ms, "
            f"plan of the row {1e3 * planning:.2f} ms, first call {first:.1f} s"
        )
    print(f"  largest difference of the outputs {(outputs[0] - outputs[1]).abs().max():.4f}")


def measure_packed() -> None:
    """Measure all rows."""
    torch.manual_seed(0)
    compiled = torch.compile(flex_attention, dynamic=False)
    print(f"{PACKED_HEADS} heads, {PACKED_KV_HEADS} of keys and values, size {PACKED_SIZE}, bfloat16")
    for title, families in PACKED_ROWS.items():
        row = packed_row(families)
        print(f"{title}: {len(row):,} tokens")
        measure_packed_row(row, compiled)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_kernels.py needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    kernels = {
        "attention": measure_attention,
        "sampling": measure_sampling,
        "digest": measure_digest,
        "packed": measure_packed,
    }
    for kernel in sys.argv[1:] or kernels:
        kernels[kernel]()

"""Measures the matrix products of decode steps on a GPU: `python benchmarks/product_kernels.py [experts] [dense]`.

Times are medians by the clock of the GPU, of launches that are replayed as a CUDA graph, in bfloat16 on random data.

- `experts`: one layer's experts at several batch sizes, by torch's grouped products and by Headrace's kernels with
  several sizes of blocks, beside the time to read the chosen experts once at the bandwidth of a copy. The sizes that
  the engine takes are marked.
- `dense`: the projections of one layer at batch 256, each by itself and fused, by cuBLAS and by cuBLASLt, beside the
  time that their operations or their bytes need.

Kernels are compiled by several processes before anything is timed.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import torch
from gpu_kernels import gpu_seconds
from triton.runtime.errors import OutOfResources

from headrace.bench.base import copy_bandwidth
from headrace.engines.embedded.device.experts import activate
from headrace.engines.embedded.kernels.experts import Blocks, Swish, choose_blocks, expert_products, sort_pairs
from headrace.models.experts import ExpertWeights, grouped_products

OPERATIONS = 790e12
"""The bfloat16 operations a second that a large product reaches on an H200."""
COMPILERS = 8


class Layer(NamedTuple):
    """The experts of one layer, and a batch of tokens."""

    name: str
    batch: int
    experts: int
    per_token: int
    width: int
    inner: int
    swish: Swish = Swish()
    transposed: bool = False


CLAMPED = Swish(1.702, 7.0, 1.0, interleaved=True)
LAYERS = (
    Layer("qwen3-moe-small", 256, 64, 8, 1024, 512),
    Layer("qwen3-30b-a3b", 128, 128, 8, 2048, 768),
    Layer("qwen3-30b-a3b", 256, 128, 8, 2048, 768),
    Layer("gpt-oss-20b", 256, 32, 4, 2880, 2880, CLAMPED, transposed=True),
)
ROWS = (
    (64, 64, 128, 4, 4),
    (64, 64, 64, 4, 6),
    (64, 64, 64, 4, 4),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 4),
)
"""Rows of gate and up, rows of down, depth, warps and stages."""
DENSE = {
    "qwen3-0.6b": (1024, (2048, 1024, 1024), 2048, 3072),
    "qwen3-8b": (4096, (4096, 1024, 1024), 4096, 12288),
}
"""A shape -> hidden size, sizes of queries, keys and values, size of the heads together, inner size."""


def make_layer(layer: Layer) -> tuple[ExpertWeights, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return random weights, and tokens that choose their experts at random."""
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    sizes = (layer.experts, 2 * layer.inner, layer.width), (layer.experts, layer.width, layer.inner)
    up, down = (torch.randn(size, **options).mul_(size[-1] ** -0.5) for size in sizes)
    biases = [torch.randn(layer.experts, size, **options) for size in (2 * layer.inner, layer.width)]
    if layer.transposed:
        up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    found = torch.rand(layer.batch, layer.experts, device="cuda").topk(layer.per_token)
    weights = torch.softmax(found.values, -1).bfloat16()
    has_bias = layer.swish.shift != 0
    experts = ExpertWeights(
        up, biases[0] if has_bias else None, down, biases[1] if has_bias else None, layer.transposed
    )
    return experts, (torch.randn(layer.batch, layer.width, **options), found.indices, weights)


def choices(layer: Layer) -> list[Blocks]:
    """Return the sizes of blocks that are tried. The first are those that the engine takes."""
    chosen = choose_blocks(layer.batch * layer.per_token, layer.experts, 2)
    tokens = [chosen.tokens, chosen.tokens // 2 if chosen.tokens > 16 else 32]
    others = [Blocks(size, *rows) for size in tokens for rows in ROWS]
    return [chosen, *(blocks for blocks in others if blocks != chosen)]


def compile_blocks(layer: Layer, blocks: Blocks) -> None:
    """Compile the kernels of these blocks, in a process of its own. Only the kernels' cache is left behind."""
    experts, call = make_layer(layer)
    expert_products(experts, layer.swish, *call, blocks)
    torch.cuda.synchronize()


def measure_experts() -> None:
    """Print a line for each layer and each size of blocks."""
    bandwidth = copy_bandwidth("cuda")
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(compile_blocks, layer, blocks) for layer in LAYERS for blocks in choices(layer)]
        failed = [future.exception() for future in waiting]
    for error in filter(None, failed):
        print(f"not compiled: {error}")
    for layer in LAYERS:
        measure_layer(layer, bandwidth)


def measure_layer(layer: Layer, bandwidth: float) -> None:
    """Print the times of one layer."""
    experts, call = make_layer(layer)
    read = call[1].unique().numel() / layer.experts * (experts.up.nbytes + experts.down.nbytes)
    print(f"{layer.name}, batch {layer.batch}: the reads alone take {1e6 * read / bandwidth:.0f} us")
    by_torch = partial(grouped_products, experts, *call, partial(activate, layer.swish))
    expected = by_torch().float()
    print(f"  torch's grouped products {1e6 * gpu_seconds(by_torch, replayed=10):.0f} us")
    for place, blocks in enumerate(choices(layer)):
        ours = partial(expert_products, experts, layer.swish, *call, blocks)
        try:
            error = float((ours().float() - expected).norm() / expected.norm())
        except OutOfResources as refused:
            print(f"  {tuple(blocks)} does not fit: {refused}")
            continue
        mark = " (chosen)" if place == 0 else ""
        print(f"  {tuple(blocks)} {1e6 * gpu_seconds(ours, replayed=10):.0f} us, differs by {error:.4f}{mark}")
    sorting = gpu_seconds(partial(sort_pairs, call[1], layer.experts, 16), replayed=10)
    print(f"  of this, the sort takes {1e6 * sorting:.1f} us")


def multiply(inputs: torch.Tensor, sets: list[list[torch.Tensor]]) -> None:
    """Launch all products."""
    for weights in sets:
        for weight in weights:
            torch.nn.functional.linear(inputs, weight)


def measure_dense(batch: int = 256) -> None:
    """Print a line for each projection, alone and fused."""
    bandwidth = copy_bandwidth("cuda")
    for name, (width, heads, attended, inner) in DENSE.items():
        products = {
            "q, k, v": [(size, width) for size in heads],
            "q with k and v": [(sum(heads), width)],
            "o": [(width, attended)],
            "gate, up": [(inner, width)] * 2,
            "gate with up": [(2 * inner, width)],
            "down": [(width, inner)],
        }
        print(f"{name}, batch {batch}")
        for title, sizes in products.items():
            # Several sets of weights take turns, so that none of them stays in the L2 cache.
            sets = [
                [torch.randn(size, dtype=torch.bfloat16, device="cuda").mul_(size[1] ** -0.5) for size in sizes]
                for _ in range(max(1, 200_000_000 // sum(2 * a * b for a, b in sizes)))
            ]
            inputs = torch.randn(batch, sizes[0][1], dtype=torch.bfloat16, device="cuda")

            numbers = sum(a * b for a, b in sizes)
            needed = max(2 * batch * numbers / OPERATIONS, 2 * numbers / bandwidth)
            found = []
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                found.append(
                    f"{library} {1e6 * gpu_seconds(partial(multiply, inputs, sets), replayed=2) / len(sets):.1f} us"
                )
            torch.backends.cuda.preferred_blas_library("default")
            print(f"  {title:15} {', '.join(found)}, needed {1e6 * needed:.1f} us")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/product_kernels.py needs a GPU")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    kernels = {"experts": measure_experts, "dense": measure_dense}
    for kernel in sys.argv[1:] or kernels:
        kernels[kernel]()

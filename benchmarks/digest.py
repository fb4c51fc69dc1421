"""Compares the digest of a model with a copy of the same bytes, on a GPU if there is one.

    python benchmarks/digest.py

On a GPU there are 600M bfloat16 elements in 300 tensors, and times are medians of 20 runs by the clock of the GPU.
`copy` is the copy that a receiver makes over live weights. `torch` is the same copy by torch. `flat copy` is the copy
of one tensor with all bytes. `host` is the time that the calling thread spends on the launch of a digest.

On a CPU there are the tensors of SmolLM2-135M, in float32 and in bfloat16, and times are the best of 11 runs, each
after one that is not counted. The copy uses one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from gpu_timing import gpu_seconds

from headrace.bench.timing import median_seconds
from headrace.delivery.digest import digest
from headrace.delivery.plan import copy_all
from headrace.models.loading import named_weights
from headrace.models.shapes import build_shape


def make_weights(elements: int, tensors: int, device: str) -> dict[str, torch.Tensor]:
    """Return matrices of different sizes and as many small vectors, as in a model."""
    columns = 1024
    rows = max(1, 2 * elements // (columns * tensors))
    made = {}
    for i in range(tensors // 2):
        share = rows // 2 if i % 2 else rows + rows // 2
        made[f"layers.{i}.weight"] = torch.randn(share, columns, device=device, dtype=torch.bfloat16)
        made[f"layers.{i}.norm"] = torch.ones(columns, device=device, dtype=torch.bfloat16)
    return made


def on_gpu(elements: int, tensors: int) -> None:
    """Measure on the GPU, and print the milliseconds of the digest and of each copy."""
    from headrace.delivery.kernels import DeviceCopy, DeviceDigest

    weights = make_weights(elements, tensors, "cuda")
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    made = DeviceDigest(weights)
    few = {name: weights[name] for name in list(weights)[:4]}
    wanted = digest((name, tensor.cpu()) for name, tensor in few.items())
    if digest(few.items()) != wanted:
        raise SystemExit("the digests of CPU and GPU differ")
    targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    copy = DeviceCopy(targets, weights)
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    flat_target = torch.empty_like(flat)
    digest_ms = 1e3 * gpu_seconds(made.launch, runs=20)
    copy_ms = 1e3 * gpu_seconds(copy.launch, runs=20)
    torch_ms = 1e3 * gpu_seconds(lambda: torch._foreach_copy_(list(targets.values()), list(weights.values())), runs=20)
    flat_ms = 1e3 * gpu_seconds(lambda: flat_target.copy_(flat), runs=20)
    # Timed as on a CPU: the call returns when the work is enqueued.
    host_ms = 1e3 * median_seconds(made.launch, repeats=20)
    print(f"{nbytes / 1e9:.2f} GB in {len(weights)} tensors on {torch.cuda.get_device_name()}")
    print(f"digest {digest_ms:.3f} ms ({nbytes / digest_ms / 1e9:.2f} TB/s read), host {host_ms:.3f} ms")
    print(f"copy {copy_ms:.3f} ms ({2 * nbytes / copy_ms / 1e9:.2f} TB/s read and written), torch {torch_ms:.3f} ms")
    print(f"flat copy {flat_ms:.3f} ms ({2 * nbytes / flat_ms / 1e9:.2f} TB/s read and written)")
    print(f"digest / flat copy {digest_ms / flat_ms:.2f}")


def on_cpu() -> None:
    """Measure on the CPU, and print the milliseconds of digest and copy, and their ratios."""
    torch.set_num_threads(1)
    for dtype in ("float32", "bfloat16"):
        weights = named_weights(build_shape("smollm2-135m", dtype, "cpu", 0))
        targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        works: dict[str, Callable[[], object]] = {
            "copy": lambda weights=weights, targets=targets: copy_all(targets, weights, threads=1),
            "one thread": lambda weights=weights: digest(weights.items(), threads=1),
            "two threads": lambda weights=weights: digest(weights.items(), threads=2),
        }
        # They take turns, so that other work on the machine slows all of them down alike.
        rounds = [{name: 1e3 * median_seconds(work, repeats=1) for name, work in works.items()} for _ in range(11)]
        best = {name: min(found[name] for found in rounds) for name in works}
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        print(f"{dtype}: {nbytes / 1e6:.0f} MB in {len(weights)} tensors, copy {best['copy']:.1f} ms")
        for name in ("one thread", "two threads"):
            print(f"  digest, {name}: {best[name]:.1f} ms, digest / copy {best[name] / best['copy']:.2f}")


def main() -> None:
    """Measure on the GPU if there is one, and on the CPU otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=600_000_000, help="on a GPU")
    parser.add_argument("--tensors", type=int, default=300, help="on a GPU")
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        on_gpu(arguments.elements, arguments.tensors)
    else:
        on_cpu()


if __name__ == "__main__":
    main()

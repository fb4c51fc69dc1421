"""What the digest of a model costs beside a copy of the same bytes, on a GPU if there is one.

    python benchmarks/digest.py

On a GPU: 600M bfloat16 elements in 300 tensors, medians of 20 runs by the GPU's own clock; `copy` is the one that a
receiver makes over live weights, `flat copy` that of one tensor of all bytes, `host` what the calling thread spends
on a launch. On a CPU: 100M elements, one thread, the best of 3.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from headrace.delivery.digest import digest


def make_weights(elements: int, tensors: int, device: str) -> dict[str, torch.Tensor]:
    """Matrices of unequal sizes and as many small vectors, as in a model."""
    columns = 1024
    rows = max(1, 2 * elements // (columns * tensors))
    made = {}
    for i in range(tensors // 2):
        share = rows // 2 if i % 2 else rows + rows // 2
        made[f"layers.{i}.weight"] = torch.randn(share, columns, device=device, dtype=torch.bfloat16)
        made[f"layers.{i}.norm"] = torch.ones(columns, device=device, dtype=torch.bfloat16)
    return made


def on_gpu(elements: int, tensors: int) -> None:
    """Print the milliseconds of each."""
    from headrace.delivery.digest_kernel import DeviceDigest

    weights = make_weights(elements, tensors, "cuda")
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    made = DeviceDigest(weights)
    few = {name: weights[name] for name in list(weights)[:4]}
    wanted = digest((name, tensor.cpu()) for name, tensor in few.items())
    if digest(few.items()) != wanted:
        raise SystemExit("the digests of CPU and GPU differ")
    targets = [torch.empty_like(tensor) for tensor in weights.values()]
    sources = list(weights.values())
    flat = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    flat_target = torch.empty_like(flat)
    digest_ms = gpu_milliseconds(made.launch)
    copy_ms = gpu_milliseconds(lambda: torch._foreach_copy_(targets, sources))
    flat_ms = gpu_milliseconds(lambda: flat_target.copy_(flat))
    host_ms = host_milliseconds(made.launch)
    print(f"{nbytes / 1e9:.2f} GB in {len(weights)} tensors on {torch.cuda.get_device_name()}")
    print(f"digest {digest_ms:.3f} ms ({nbytes / digest_ms / 1e9:.2f} TB/s read), host {host_ms:.3f} ms")
    print(f"copy {copy_ms:.3f} ms, flat copy {flat_ms:.3f} ms ({2 * nbytes / flat_ms / 1e9:.2f} TB/s read and written)")
    print(f"digest / flat copy {digest_ms / flat_ms:.2f}")


def gpu_milliseconds(work: Callable[[], object], runs: int = 20) -> float:
    """The median time of the work on the GPU, warm."""
    work()
    times = []
    for _ in range(runs):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def host_milliseconds(work: Callable[[], object], runs: int = 20) -> float:
    """The median time until the work is enqueued."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def on_cpu(elements: int, tensors: int) -> None:
    """Print the seconds of both, and their ratio."""
    torch.set_num_threads(1)
    weights = make_weights(elements, tensors, "cpu")
    targets = [torch.empty_like(tensor) for tensor in weights.values()]
    digest_times, copy_times = [], []
    for _ in range(3):
        started = time.perf_counter()
        digest(weights.items())
        digested = time.perf_counter()
        torch._foreach_copy_(targets, list(weights.values()))
        digest_times.append(digested - started)
        copy_times.append(time.perf_counter() - digested)
    print(f"{sum(tensor.nbytes for tensor in weights.values()) / 1e9:.2f} GB in {len(weights)} tensors on one core")
    print(f"digest {min(digest_times):.3f} s, copy {min(copy_times):.3f} s")
    print(f"digest / copy {min(digest_times) / min(copy_times):.2f}")


def main() -> None:
    """Measure on what there is."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=0, help="0: 600M on a GPU, 100M on a CPU")
    parser.add_argument("--tensors", type=int, default=300)
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        on_gpu(arguments.elements or 600_000_000, arguments.tensors)
    else:
        on_cpu(arguments.elements or 100_000_000, arguments.tensors)


if __name__ == "__main__":
    main()

"""Compares the digest of a model with a copy of the same bytes, on a GPU if there is one.

    python benchmarks/digest.py

On a GPU there are 600M bfloat16 elements in 300 tensors, and times are medians of 20 runs by the clock of the GPU.
`copy` is the copy that a receiver makes over live weights. `torch` is the same copy by torch. `flat copy` is the copy
of one tensor with all bytes. `host` is the time that the calling thread spends on the launch of a digest.

On a CPU there are the tensors of SmolLM2-135M, in float32 and in bfloat16, and times are the best of 21 runs. The copy
uses one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from headrace.delivery.digest import digest

LAYER = {
    "self_attn.q_proj": (576, 576),
    "self_attn.k_proj": (192, 576),
    "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576),
    "mlp.gate_proj": (1536, 576),
    "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
    "input_layernorm": (576,),
    "post_attention_layernorm": (576,),
}
SHAPES: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (49152, 576), "model.norm.weight": (576,)}
SHAPES |= {f"model.layers.{i}.{name}.weight": shape for i in range(30) for name, shape in LAYER.items()}
"""The names and shapes of SmolLM2-135M's tensors."""


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
    from headrace.delivery.kernels.copy import DeviceCopy
    from headrace.delivery.kernels.digest import DeviceDigest

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
    digest_ms = gpu_milliseconds(made.launch)
    copy_ms = gpu_milliseconds(copy.launch)
    torch_ms = gpu_milliseconds(lambda: torch._foreach_copy_(list(targets.values()), list(weights.values())))
    flat_ms = gpu_milliseconds(lambda: flat_target.copy_(flat))
    host_ms = host_milliseconds(made.launch)
    print(f"{nbytes / 1e9:.2f} GB in {len(weights)} tensors on {torch.cuda.get_device_name()}")
    print(f"digest {digest_ms:.3f} ms ({nbytes / digest_ms / 1e9:.2f} TB/s read), host {host_ms:.3f} ms")
    print(f"copy {copy_ms:.3f} ms ({2 * nbytes / copy_ms / 1e9:.2f} TB/s read and written), torch {torch_ms:.3f} ms")
    print(f"flat copy {flat_ms:.3f} ms ({2 * nbytes / flat_ms / 1e9:.2f} TB/s read and written)")
    print(f"digest / flat copy {digest_ms / flat_ms:.2f}")


def gpu_milliseconds(work: Callable[[], object], runs: int = 20) -> float:
    """Return the median milliseconds of the work on the GPU. A first call is not counted."""
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
    """Return the median milliseconds until the work is enqueued."""
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def on_cpu() -> None:
    """Measure on the CPU, and print the milliseconds of digest and copy, and their ratios."""
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        weights = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
        targets = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        works: dict[str, Callable[[], object]] = {
            "copy": lambda weights=weights, targets=targets: copy_all(targets, weights),
            "one thread": lambda weights=weights: digest(weights.items(), threads=1),
            "two threads": lambda weights=weights: digest(weights.items(), threads=2),
        }
        best = dict.fromkeys(works, float("inf"))
        # They take turns, so that other work on the machine slows all of them down alike.
        for _ in range(21):
            for name, work in works.items():
                started = time.perf_counter()
                work()
                best[name] = min(best[name], 1000 * (time.perf_counter() - started))
        nbytes = sum(tensor.nbytes for tensor in weights.values())
        print(f"{dtype}: {nbytes / 1e6:.0f} MB in {len(weights)} tensors, copy {best['copy']:.1f} ms")
        for name in ("one thread", "two threads"):
            print(f"  digest, {name}: {best[name]:.1f} ms, digest / copy {best[name] / best['copy']:.2f}")


def copy_all(targets: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """Copy the weights tensor by tensor, as a snapshot is made."""
    for name, tensor in weights.items():
        targets[name].copy_(tensor)


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

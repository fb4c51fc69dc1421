"""Compares the digest of a model on a GPU with copies of the same bytes: `python benchmarks/digest.py`.

There are 600M bfloat16 elements in 300 tensors, and times are medians of 20 runs by the clock of the GPU. `copy` is the
copy that a receiver makes over live weights. `torch` is the same copy by torch. `flat copy` is the copy of one tensor
with all bytes. For a CPU, `headrace bench delivery` measures the digest beside a copy.
"""

from __future__ import annotations

import torch

from headrace.bench.timing import gpu_seconds
from headrace.delivery.digest import digest
from headrace.delivery.kernels import DeviceCopy, DeviceDigest

ELEMENTS, TENSORS, COLUMNS = 600_000_000, 300, 1024


def make_weights() -> dict[str, torch.Tensor]:
    """Return matrices of different sizes and as many small vectors, as in a model."""
    rows = 2 * ELEMENTS // (COLUMNS * TENSORS)
    made = {}
    for i in range(TENSORS // 2):
        share = rows // 2 if i % 2 else rows + rows // 2
        made[f"layers.{i}.weight"] = torch.randn(share, COLUMNS, device="cuda", dtype=torch.bfloat16)
        made[f"layers.{i}.norm"] = torch.ones(COLUMNS, device="cuda", dtype=torch.bfloat16)
    return made


def main() -> None:
    """Print the milliseconds of the digest and of each copy."""
    weights = make_weights()
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
    print(f"{nbytes / 1e9:.2f} GB in {len(weights)} tensors on {torch.cuda.get_device_name()}")
    for name, work in works.items():
        seconds = gpu_seconds(work, runs=20)
        moved = nbytes if name == "digest" else 2 * nbytes
        print(f"{name} {1e3 * seconds:.3f} ms, {moved / seconds / 1e12:.2f} TB/s read and written")


if __name__ == "__main__":
    main()

"""Measures the cost of a delta of weights on this machine: its bytes, and the seconds to make it and to apply it.

    python benchmarks/delta.py --changed 0.01 0.03

Weights are random bfloat16 values in the shapes of SmolLM2-135M, spread as in a trained model. A share of the words
changes by one unit in the last place, and one changed word in ten by two units, as after small steps in bfloat16. In
the row `float32`, every word changes by about a millionth. Seconds are the best of `--repeats`.
"""

from __future__ import annotations

import argparse

import torch

from headrace.bench.timing import median_seconds
from headrace.delivery import delta
from headrace.delivery.plan import PackingPlan, pack, plan_weights
from headrace.models.loading import named_weights
from headrace.models.shapes import build_shape


def packed(plan: PackingPlan, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the weights as a packed snapshot."""
    snapshot = torch.zeros(plan.nbytes, dtype=torch.uint8)
    pack(snapshot, plan.entries, weights)
    return snapshot


def stepped(base: torch.Tensor, share: float) -> torch.Tensor:
    """Return the bfloat16 snapshot after a small step that changes this share of the words."""
    generator = torch.Generator().manual_seed(1)
    new = base.clone()
    words = new.view(torch.int16)
    chosen = (torch.rand(len(words), generator=generator) < share).nonzero().flatten()
    sizes = 1 + (torch.rand(len(chosen), generator=generator) < 0.1).to(torch.int16)
    signs = (torch.rand(len(chosen), generator=generator) < 0.5).to(torch.int16) * 2 - 1
    words[chosen] += sizes * signs
    return new


def measure(name: str, base: torch.Tensor, new: torch.Tensor, word_bytes: int, repeats: int, threads: int) -> None:
    """Measure and print one row of the table."""
    changed = (base.view(-1, word_bytes) != new.view(-1, word_bytes)).any(1).float().mean().item()
    payload = delta.encode(base, new, word_bytes, threads=threads)
    encoding = median_seconds(lambda: delta.encode(base, new, word_bytes, threads=threads), repeats=repeats, of=min)
    if payload is None:
        print(f"{name:20} {changed:8.4f} {'none':>12} {'':>8} {encoding:9.3f}")
        return
    target = base.clone()
    delta.apply(payload, target, threads=threads)
    assert torch.equal(target, new)
    applying = median_seconds(lambda: delta.apply(payload, target, threads=threads), repeats=repeats, of=min)
    print(f"{name:20} {changed:8.4f} {len(payload):12} {len(new) / len(payload):8.1f} {encoding:9.3f} {applying:9.3f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", type=float, nargs="+", default=[0.001, 0.01, 0.03, 0.1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    # Twice as wide as a new model's weights, which is about as wide as those of a trained model.
    model = build_shape("smollm2-135m", "float32", "cpu", 0)
    weights = {name: 2 * tensor for name, tensor in named_weights(model).items()}
    plan = plan_weights(weights, "bfloat16")
    base = packed(plan, weights)
    copy = torch.empty_like(base)
    copying = median_seconds(lambda: copy.copy_(base), of=min)
    print(f"{plan.nbytes} bytes in bfloat16; a copy takes {copying:.3f} s")
    print(f"{'':20} {'changed':>8} {'bytes':>12} {'full/':>8} {'encode s':>9} {'apply s':>9}")
    for share in options.changed:
        measure(f"bfloat16, {share:.2%}", base, stepped(base, share), 2, options.repeats, options.threads)
    noise = torch.randint(0, 256, base.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    measure("bfloat16, hopeless", base, noise, 2, options.repeats, options.threads)
    del noise
    plan = plan_weights(weights, "float32")
    base = packed(plan, weights)
    torch.manual_seed(3)
    for tensor in weights.values():
        tensor.add_(torch.randn_like(tensor), alpha=1e-6)
    measure("float32, all by 1e-6", base, packed(plan, weights), 4, options.repeats, options.threads)


if __name__ == "__main__":
    main()

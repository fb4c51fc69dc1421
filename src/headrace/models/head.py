"""Float32 logits: the last matrix product of a 16-bit model is not rounded back to 16 bits, in engines and trainer.

Near the likeliest tokens, a bfloat16 logit is only exact to some hundredths, and a log-probability would have the same
error. The product itself accumulates in float32 anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

HALF = (torch.bfloat16, torch.float16)


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return `left @ right.t()` of two matrices, in float32 at least."""
    if left.dtype not in HALF:
        return left @ right.t()
    if left.is_cuda:
        return torch.mm(left, right.t(), out_dtype=torch.float32)
    return left.float() @ right.float().t()


def keep_logits_in_float32(model: Any) -> bool:
    """Make this model's vocabulary projection return float32. Return False if it is not a plain 16-bit one on a GPU."""
    head = model.get_output_embeddings()
    plain = isinstance(head, torch.nn.Linear) and head.bias is None
    if not plain or head.weight.device.type != "cuda" or head.weight.dtype not in HALF:
        return False

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        return wide_product(flat, head.weight).view(*hidden.shape[:-1], -1)

    head.forward = forward
    return True


@contextmanager
def float32_head(model: Any) -> Iterator[None]:
    """Compute the vocabulary projection wholly in float32 inside this context.

    This is slow. It is the reference for `keep_logits_in_float32`.
    """
    head = model.get_output_embeddings()
    before = head.__dict__.get("forward")
    head.forward = lambda hidden: torch.nn.functional.linear(
        hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float()
    )
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before

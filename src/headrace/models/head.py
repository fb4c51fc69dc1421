"""Float32 logits: the last matrix product of a 16-bit model is not rounded back to 16 bits, in engines and trainer.

Near the likeliest tokens, a bfloat16 logit is only exact to some hundredths, and a log-probability would have the same
error. The product itself accumulates in float32 anyway.

Engines replace the forward of a plain head once (`keep_logits_in_float32`). The trainer computes one chunk of positions
at a time, with gradients: inside `WideHead.in_force` the model's own head code computes the logits, and the head's
matrices multiply into float32, so a bias, scale or cap that follows is computed in float32 too. The gradient of a
matrix is added up in float32 over all chunks of a row.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

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
    """Compute the vocabulary projection wholly in float32: slow, and the reference for `keep_logits_in_float32`."""
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


class WideHead:
    """The head of one model while one row is read: forward, and again in the backward pass."""

    def __init__(self, model: Any) -> None:
        head = model.get_output_embeddings()
        # The 16-bit matrices with an output for each token are the head's, and what an adapter adds to the head.
        self._forwards = [
            (layer, _wide(layer))
            for layer in head.modules()
            if type(layer) is torch.nn.Linear
            and layer.weight.shape[0] == head.weight.shape[0]
            and layer.weight.dtype in HALF
        ]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Make the head's 16-bit matrices multiply into float32 inside this context."""
        with ExitStack() as undo:
            for layer, forward in self._forwards:
                layer.__dict__["forward"] = forward
                undo.callback(layer.__dict__.pop, "forward")
            yield


def _wide(layer: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward function that gives the layer's output in float32.

    The function is called once for each chunk of a row. All calls share one stand-in for the weight, in which the
    weight's gradients of all chunks add up in float32 before they are cast to the weight's dtype once.
    """
    weight = layer.weight.to_local() if isinstance(layer.weight, DTensor) else layer.weight
    gradient: torch.Tensor = _Gradient.apply(weight)  # type: ignore[no-untyped-call]

    def multiplied(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        found: torch.Tensor = _Product.apply(rows, weight.detach(), gradient)  # type: ignore[no-untyped-call]
        return found.reshape(*hidden.shape[:-1], -1)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if isinstance(hidden, DTensor):
            # The vocabulary is divided over the tensor ranks. Each rank computes the logits of its own part of the
            # vocabulary, so its gradient of the hidden states is only one summand of the whole gradient.
            own = multiplied(hidden.to_local(grad_placements=[Partial()]))
            whole = torch.empty((*own.shape[:-1], layer.weight.shape[0]), device="meta")
            logits: torch.Tensor = DTensor.from_local(
                own, hidden.device_mesh, [Shard(-1)], shape=whole.shape, stride=whole.stride()
            )
        else:
            logits = multiplied(hidden)
        return logits if layer.bias is None else logits + layer.bias

    return forward


class _Gradient(torch.autograd.Function):
    """Makes the stand-in for a matrix: a float32 tensor of the same shape that takes no memory.

    Autograd sums the stand-in's gradients in float32. Then `backward` casts the sum to the dtype of the matrix.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(ctx.dtype)


class _Product(torch.autograd.Function):
    """The product `hidden @ weight.t()` in float32. The weight's gradient goes to the stand-in of `_Gradient`."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return wide_product(hidden, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        slopes = gradient.to(hidden.dtype)
        of_hidden = slopes @ weight if ctx.needs_input_grad[0] else None
        of_weight = wide_product(slopes.t(), hidden.t()) if ctx.needs_input_grad[2] else None
        return of_hidden, None, of_weight

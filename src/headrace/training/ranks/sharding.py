"""A model over several ranks: FSDP2 by decoder layer, rows of work over `data`, matrices over `tensor`.

Sharding changes where weights are and which rank computes what, but never what is computed. With a single rank, the
model is not wrapped at all, unless weights are offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headrace.config.schema import TrainingConfig
from headrace.delivery.parts import held_region
from headrace.errors import UserError
from headrace.training.devices import compute_dtype, input_device
from headrace.training.ranks.base import Ranks
from headrace.training.ranks.tensor_parallel import split_matrices


def shard_model(model: Any, layers: Sequence[torch.nn.Module], ranks: Ranks, training: TrainingConfig) -> None:
    """Cut a model, which every rank holds as a whole, into the shards of the ranks, in place and layer by layer."""
    if training.offload and ranks.device.type == "cpu":
        raise UserError("[training] offload: the trainer is on the CPU, where its weights already are")
    if ranks.tensor_ranks > 1:
        split_matrices(model, layers, ranks.mesh["tensor"])
    half = compute_dtype(training, ranks.device) == "bfloat16"
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    offload = CPUOffloadPolicy() if training.offload else OffloadPolicy()
    for module in (*layers, model):
        fully_shard(module, mesh=ranks.mesh["data"], mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A batch's weights are already divided by the count of the whole step, so gradients are summed, over ranks
            # too.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reduce_gradients(model: torch.nn.Module, now: bool) -> None:
    """Set whether the next backward pass sums its gradients over the ranks, or keeps them for a later pass."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)


def reshard(model: torch.nn.Module) -> None:
    """Release weights that a pass without a backward pass has left gathered."""
    if isinstance(model, FSDPModule):
        model.reshard()


def bring_to_rest(model: torch.nn.Module) -> None:
    """Make sure that no pass holds or reads the weights any more, so that they can be exchanged in place."""
    reshard(model)
    device, held = input_device(model), local_tensor(next(model.parameters()))
    if device.type == "cuda" and held.device.type == "cpu":
        # The GPU copies offloaded weights from the host asynchronously.
        torch.cuda.synchronize(device)


def local_part(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return the part of a parameter that this rank holds, on the same memory.

    If it is not sharded, that is all of it.
    """
    part = local_tensor(parameter)
    return parameter if part is parameter else torch.nn.Parameter(part, requires_grad=parameter.requires_grad)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, on the same memory. If it is not sharded, that is all of it."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, of which this rank may hold a part. All ranks must make the same calls."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_own_part(saved: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Copy whole tensors over weights of which this rank may hold only a part."""
    for name, tensor in weights.items():
        local_tensor(tensor).copy_(saved[name][held_region(tensor).slices])


def placed_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return an optimizer tensor as a shard, placed like its parameter.

    A tensor with another shape is returned as it is.
    """
    if not isinstance(parameter, DTensor) or part.shape != parameter.to_local().shape or not part.ndim:
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def on_whole_matrices(
    function: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor, parameter: torch.Tensor
) -> torch.Tensor:
    """Apply a function to matrices [..., m, n] of which this rank holds a part, and return its part of the result.

    `part` is cut like `parameter`. Every rank gathers the matrices and computes all of them, unless a stack is cut only
    between its matrices. All ranks must make the same calls.
    """
    if not isinstance(parameter, DTensor) or not _cuts_matrices(parameter):
        return function(part)
    mine = held_region(parameter).slices
    gathered: Any = placed_like(part, parameter)
    return function(gathered.full_tensor())[mine].to(part.device)


def _cuts_matrices(parameter: DTensor) -> bool:
    return any(getattr(placement, "dim", -1) >= parameter.ndim - 2 for placement in parameter.placements)


def global_norm(gradients: Iterable[torch.Tensor], ranks: Ranks | None) -> torch.Tensor:
    """Return the norm of all gradients together, with each element counted once. It is equal on all ranks."""
    gradients = list(gradients)
    if ranks is None:
        return torch.nn.utils.get_total_norm(gradients)
    held: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        held.setdefault(copies(gradient, ranks), []).append(local_tensor(gradient))
    mine = sum(float(torch.nn.utils.get_total_norm(parts)) ** 2 / times for times, parts in held.items())
    (total,) = ranks.sum_over_all([mine])
    return torch.tensor(total, dtype=torch.float64).sqrt()


def copies(gradient: torch.Tensor, ranks: Ranks) -> int:
    """Return how many ranks hold the same elements of a gradient or a parameter as this rank."""
    if not isinstance(gradient, DTensor):
        return ranks.count
    shards = 1
    for placement, size in zip(gradient.placements, gradient.device_mesh.shape, strict=True):
        shards *= size if not placement.is_replicate() else 1
    return ranks.count // shards

"""The trainer's ranks: one process each, in a grid of `data` (rows of work) by `tensor` (slices of the model).

Every rank is sent the same messages in the same order, so all ranks reach the same collective. No rank waits longer for
the others than the deadline of the process group. A background thread uses a process group of its own, not
the group of the step.

Models are sharded by FSDP2, decoder layer by decoder layer. Sharding changes where weights are and which rank computes
what, but never what is computed. With a single rank, the model is not wrapped at all, unless weights are offloaded.

How matrices are cut over tensor ranks is in `tensor_plan`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from headrace.config.schema import TrainingConfig
from headrace.delivery.parts import held_region
from headrace.delivery.transports.collectives import LOOPBACK, use_interface
from headrace.errors import UserError
from headrace.training.devices import compute_dtype, input_device
from headrace.training.tensor_plan import cut_model


@dataclass(frozen=True)
class Ranks:
    """This rank's place among all ranks, and the process groups that it uses."""

    rank: int
    mesh: DeviceMesh
    device: torch.device
    publishing: dist.ProcessGroup
    """The process group of the publisher's thread, on the host."""
    resending: dist.ProcessGroup
    """The process group of the thread in which versions are sent again, on the host."""
    storing: dist.ProcessGroup
    """The process group of the thread that writes checkpoints, on the host."""

    @property
    def count(self) -> int:
        """The number of all ranks."""
        return self.mesh.size()

    @property
    def data(self) -> int:
        """The index of this rank's share of a step's rows."""
        return self.mesh.get_local_rank("data")

    @property
    def data_ranks(self) -> int:
        """The number of shares into which the rows of a step are divided."""
        return self.mesh["data"].size()

    @property
    def tensor_ranks(self) -> int:
        """The number of ranks that work on one row together."""
        return self.mesh["tensor"].size() if "tensor" in self._names else 1

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's place in the grid, by dimension."""
        return {name: self.mesh.get_local_rank(name) for name in self._names}

    def sum_over_data(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the shares of the rows. They are equal on all ranks."""
        return self._summed(values, self.mesh.get_group("data"))

    def sum_over_all(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all ranks. They are equal on all ranks."""
        return self._summed(values, None)

    def add_over_data(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, in place, by its sum over the shares of the rows. It is then equal on all ranks."""
        dist.all_reduce(tensor, group=self.mesh.get_group("data"))

    def meet(self) -> None:
        """Wait until every rank has called this method."""
        dist.barrier(self.storing)

    def leave(self) -> None:
        """Destroy the process groups. This is the last call of a rank."""
        dist.destroy_process_group()

    @property
    def _names(self) -> tuple[str, ...]:
        return self.mesh.mesh_dim_names or ()

    def _summed(self, values: Sequence[float], group: dist.ProcessGroup | None) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total, group=group)
        return [float(value) for value in total.tolist()]


def join(
    store: Path | Store,
    rank: int,
    ranks: int,
    *,
    tensor_parallel: int,
    device: str,
    timeout: float,
    address: str = LOOPBACK,
) -> Ranks:
    """Meet the other ranks and form the grid. Raises torch's error if they do not come within `timeout` seconds.

    `store` is where they meet: a file that did not exist before, or a store that all of them reach. `address` is the
    address of this host at which the others reach this rank: nothing listens on another interface than that of this
    address, whatever the name of this host resolves to. On GPUs, each rank takes a GPU of its own.
    """
    use_interface(address)
    place = torch.device(device)
    if place.type == "cuda":
        place = torch.device("cuda", 0)  # Of the GPUs that a worker sees, the first one is its own.
        torch.cuda.set_device(place)
    wait = timedelta(seconds=timeout)
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        init_method=f"file://{store.absolute()}" if isinstance(store, Path) else None,
        store=None if isinstance(store, Path) else store,
        rank=rank,
        world_size=ranks,
        timeout=wait,
    )
    grid = {"data": ranks // tensor_parallel}
    if tensor_parallel > 1:
        grid["tensor"] = tensor_parallel
    mesh = init_device_mesh(place.type, tuple(grid.values()), mesh_dim_names=tuple(grid))
    publishing, resending, storing = (dist.new_group(backend="gloo", timeout=wait) for _ in range(3))
    return Ranks(rank, mesh, place, publishing, resending, storing)


def shard_model(model: Any, layers: Sequence[torch.nn.Module], ranks: Ranks, training: TrainingConfig) -> None:
    """Cut a model, which every rank holds as a whole, into the shards of the ranks, in place and layer by layer."""
    if training.offload and ranks.device.type == "cpu":
        raise UserError("[training] offload: the trainer is on the CPU, where its weights already are")
    if ranks.tensor_ranks > 1:
        cut_model(model, layers, ranks.mesh["tensor"])
    half = compute_dtype(training, ranks.device) == "bfloat16"
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    offload = CPUOffloadPolicy() if training.offload else OffloadPolicy()
    for module in (*layers, model):
        fully_shard(module, mesh=ranks.mesh["data"], mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A batch's weights are already divided by the count of the whole step, so ranks sum gradients.
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
    """Return the part of a parameter that this rank holds, on the same memory: all of it, unless it is sharded."""
    part = local_tensor(parameter)
    return parameter if part is parameter else torch.nn.Parameter(part, requires_grad=parameter.requires_grad)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that this rank holds, on the same memory. If it is not sharded, that is all of it."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, of which this rank may hold a part. All ranks must make the same calls."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that this rank holds, cut like another tensor of the same shape."""
    return tensor[held_region(like).slices]


@torch.no_grad()
def copy_own_part(saved: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Copy whole tensors over weights of which this rank may hold only a part."""
    for name, tensor in weights.items():
        local_tensor(tensor).copy_(own_part(saved[name], tensor))


def placed_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return an optimizer tensor as a shard, placed like its parameter, or as it is if it has another shape."""
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
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    if not any(getattr(placement, "dim", -1) >= parameter.ndim - 2 for placement in placements):
        return function(part)
    return own_part(function(whole_tensor(placed_like(part, parameter))), parameter).to(part.device)


def global_norm(
    gradients: Iterable[torch.Tensor], ranks: Ranks | None, loss: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the norm of all gradients together, with each element counted once. It is equal on all ranks.

    It is not a number if the `loss` of any rank is not finite: such a loss may have gradients that look harmless.
    """
    gradients = list(gradients)
    if ranks is None:
        norm = torch.nn.utils.get_total_norm(gradients)
        # Nothing is copied between host and device here: that would wait for the device.
        return norm if loss is None else norm + (0.0 * loss).to(norm)
    held: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        held.setdefault(copies(gradient, ranks), []).append(local_tensor(gradient))
    mine = sum(float(torch.nn.utils.get_total_norm(parts)) ** 2 / times for times, parts in held.items())
    (total,) = ranks.sum_over_all([mine + (0.0 if loss is None else 0.0 * float(loss))])
    return torch.tensor(total, dtype=torch.float64).sqrt()


def copies(gradient: torch.Tensor, ranks: Ranks) -> int:
    """Return how many ranks hold the same elements of a gradient or a parameter as this rank."""
    if not isinstance(gradient, DTensor):
        return ranks.count
    shards = 1
    for placement, size in zip(gradient.placements, gradient.device_mesh.shape, strict=True):
        shards *= size if not placement.is_replicate() else 1
    return ranks.count // shards

"""The trainer's ranks: one process each, in a grid of `data` (rows of work) by `tensor` (slices of the model).

Every rank is sent the same messages in the same order, so all ranks reach the same collective. No rank waits longer for
the others than the deadline of the process group. A background thread uses a process group of its own, never the group
of the step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from headrace.errors import UserError

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Ranks:
    """This rank's place among all ranks, and the process groups that it uses."""

    rank: int
    mesh: DeviceMesh
    device: torch.device
    publishing: dist.ProcessGroup
    """The process group of the publisher's thread, on the host."""
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


def join(store: Path, rank: int, ranks: int, *, tensor_parallel: int, device: str, timeout: float) -> Ranks:
    """Meet the other ranks at `store`, a file that did not exist before, and form the grid.

    On GPUs each rank has a GPU of its own. Raises a `UserError` if there are too few GPUs.
    """
    # On one host, nothing may listen beyond the host, whatever its name resolves to. A launcher for several hosts sets
    # these.
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, _LOOPBACK)
    place = torch.device(device)
    if place.type == "cuda":
        if ranks > (here := torch.cuda.device_count()):
            # NCCL does not work with two ranks on one GPU.
            raise UserError(f"[training] ranks: {ranks} ranks need {ranks} GPUs, and this machine has {here}")
        place = torch.device("cuda", rank)
        torch.cuda.set_device(place)
    wait = timedelta(seconds=timeout)
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        init_method=f"file://{store.absolute()}",
        rank=rank,
        world_size=ranks,
        timeout=wait,
    )
    grid = {"data": ranks // tensor_parallel}
    if tensor_parallel > 1:
        grid["tensor"] = tensor_parallel
    mesh = init_device_mesh(place.type, tuple(grid.values()), mesh_dim_names=tuple(grid))
    publishing, storing = (dist.new_group(backend="gloo", timeout=wait) for _ in range(2))
    return Ranks(rank, mesh, place, publishing, storing)

"""Where ranks compute: on GPUs each has its own, and too few of them are said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headrace.errors import UserError
from headrace.training.ranks import join


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs, as far as ranks see before they meet; the devices that were taken."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


def meet(directory: Path, rank: int, ranks: int) -> None:
    join(directory / "store", rank, ranks, tensor_parallel=1, device="cuda", timeout=60)


def test_more_ranks_than_gpus_are_refused_before_they_meet(tmp_path: Path, two_gpus: list[torch.device]) -> None:
    for rank in range(3):
        with pytest.raises(UserError) as refused:
            meet(tmp_path, rank, 3)
        assert str(refused.value) == "[training] ranks: 3 ranks need 3 GPUs, and this machine has 2"
    assert two_gpus == [] and list(tmp_path.iterdir()) == []


def test_each_rank_has_a_gpu_of_its_own(
    tmp_path: Path, two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Met(Exception):
        """Far enough."""

    def met(backend: str, **_: object) -> None:
        assert backend == "nccl"
        raise Met

    monkeypatch.setattr(dist, "init_process_group", met)
    for rank in range(2):
        with pytest.raises(Met):
            meet(tmp_path, rank, 2)
    assert two_gpus == [torch.device("cuda", 0), torch.device("cuda", 1)]

"""Where ranks compute: on GPUs each has its own, and too few of them are said in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headrace.training.ranks import join


def test_the_first_gpu_that_a_rank_sees_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Met(Exception):
        """Far enough."""

    def met(backend: str, **_: object) -> None:
        assert backend == "nccl"
        raise Met

    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(dist, "init_process_group", met)
    for rank in range(2):
        with pytest.raises(Met):
            join(tmp_path / "store", rank, 2, tensor_parallel=1, device="cuda", timeout=60)
    assert taken == [torch.device("cuda", 0)] * 2

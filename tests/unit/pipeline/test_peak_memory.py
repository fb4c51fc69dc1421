"""How much of a GPU each process has held: said with its beats, kept in the journal's `meta`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from controller_parts import FakeRun

from headrace.channel.heartbeats import Heartbeat
from headrace.channel.worker_link import WorkerLink
from headrace.cluster.worker_main import peak_gpu_memory


def test_a_beat_says_what_the_process_has_held(tmp_path: Path) -> None:
    assert WorkerLink("engine-0", f"ipc://{tmp_path}/hub", tmp_path).beat().peak_memory_bytes == 0
    link = WorkerLink("engine-0", f"ipc://{tmp_path}/hub", tmp_path, peak_memory=lambda: 7)
    assert link.beat().peak_memory_bytes == 7


def test_all_gpus_of_a_process_count_once_it_uses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_gpu_memory() == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 10 * (device + 1))
    assert peak_gpu_memory() == 30


@pytest.mark.parametrize("half", [None, ModuleType("torch")])
def test_a_process_that_has_not_loaded_torch_has_held_nothing(
    half: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is torch loaded for the answer. A module that another thread is importing has no `cuda` yet."""
    monkeypatch.delitem(sys.modules, "torch")
    if half is not None:
        monkeypatch.setitem(sys.modules, "torch", half)
    assert peak_gpu_memory() == 0
    assert sys.modules.get("torch") is half


async def test_the_journal_keeps_the_most_of_each_process(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    for process, held in (("engine-0", 5), ("trainer-0", 9), ("engine-0", 8), ("engine-0", 2), ("engine-1", 0)):
        run.recorder.beat(process, Heartbeat(phase="ready", time=time.monotonic(), peak_memory_bytes=held))
    await run.run()
    (row,) = run.journal("SELECT value FROM meta WHERE key = 'peak_memory_bytes'")
    assert json.loads(row["value"]) == {"engine-0": 8, "trainer-0": 9}

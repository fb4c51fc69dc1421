"""How much of a GPU each process has held: said with its beats, kept in the journal's `meta`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from controller_parts import FakeRun

from headrace.channel.heartbeats import Heartbeat
from headrace.channel.worker_link import WorkerLink
from headrace.cluster.worker_main import peak_gpu_memory


def test_a_beat_says_what_the_process_has_held(tmp_path: Path) -> None:
    link = WorkerLink("engine-0", f"ipc://{tmp_path}/hub", tmp_path)
    assert link.beat().peak_memory_bytes == 0
    link.peak_memory = lambda: 7
    assert link.beat().peak_memory_bytes == 7


def test_all_gpus_of_a_process_count_once_it_uses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_gpu_memory() == 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 10 * (device + 1))
    assert peak_gpu_memory() == 30


async def test_the_journal_keeps_the_most_of_each_process(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    for process, held in (("engine-0", 5), ("trainer-0", 9), ("engine-0", 8), ("engine-0", 2), ("engine-1", 0)):
        run.recorder.beat(process, Heartbeat(phase="ready", time=time.monotonic(), peak_memory_bytes=held))
    await run.run()
    (row,) = run.journal("SELECT value FROM meta WHERE key = 'peak_memory_bytes'")
    assert json.loads(row["value"]) == {"engine-0": 8, "trainer-0": 9}

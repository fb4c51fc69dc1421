"""`headrace doctor --gpus` on this machine's GPUs: every transport that applies holds."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def doctor(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "headrace", "doctor", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.timeout(960)
def test_every_transport_that_applies_holds() -> None:
    found = doctor("--gpus")
    tested = {run["transport"]: run for run in found["runs"]}
    # NCCL refuses two processes on one GPU, and several ranks.
    assert {"shm", "file", "tcp", "cuda_ipc"} <= set(tested) and set(found["not_run"]) <= {"nccl"}
    assert found["held"], found
    for run in tested.values():
        assert run["trainer"].startswith("GPU ") and run["engines"].startswith("GPU ")
        assert (run["failure"], run["versions_proved"]) == ("", 5)
        assert run["slowest_proof_seconds"] > 0 and run["longest_pause_seconds"] > 0


def test_the_map_names_the_gpus_and_who_is_on_them() -> None:
    found = doctor()["gpus"]
    assert torch.cuda.get_device_name(0) in found["0"] and "GiB" in found["0"]
    assert {"trainer-0", "engine-0"} <= set(found)
    assert all("GPU" in where for name, where in found.items() if "-" in name)

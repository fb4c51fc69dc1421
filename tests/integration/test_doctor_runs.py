"""`headrace doctor --gpus --cpu`: its runs are real, and what it prints is what they did."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from runs import headrace, segments_left

from headrace.cli.self_test import HEADER
from headrace.delivery.transports import WITHOUT_GPU

pytestmark = pytest.mark.slow


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which temporary ones are made."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_every_transport_of_a_cpu_holds(scratch: Path) -> None:
    done = headrace("doctor", "--gpus", "--cpu", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    trainer, engine, header, *rows, verdict, not_tested = done.stdout.splitlines()
    assert trainer.startswith("trainer-0 ") and engine.startswith("engine-0 ")
    assert re.split(" {2,}", header) == list(HEADER)
    *tested, refused = rows
    row = re.compile(r"(\w+) +CPU +CPU +5 of 5 +\S+ s +\S+ ms +\S+ s  held")
    assert [match and match[1] for match in map(row.fullmatch, tested)] == list(WITHOUT_GPU)
    assert refused == 'cuda_ipc   not run: [delivery] transport = "cuda_ipc" needs trainer and engines on GPUs'
    assert verdict == "4 of 4 transports held"
    assert "several hosts" in not_tested
    assert list(scratch.glob("headrace-doctor-*")) == []
    assert segments_left() == set()


def test_one_transport_and_several_workers_as_the_settings_say(scratch: Path) -> None:
    settings = ("engine.count=2", "training.ranks=2", "delivery.transport=tcp", "run.versions=2")
    done = headrace("doctor", "--gpus", "--cpu", "--json", *(word for each in settings for word in ("--set", each)))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert list(found["places"]) == ["trainer-0", "trainer-1", "engine-0", "engine-1"]
    (run,) = found["runs"]
    assert (run["transport"], run["versions_proved"], run["versions"], run["failure"]) == ("tcp", 3, 3, "")
    assert min(run["slowest_proof_seconds"], run["longest_pause_seconds"], run["train_seconds"]) > 0
    assert (found["held"], found["not_run"]) == (True, {})
    assert "held" in done.stderr


def test_a_transport_that_fails_is_told_in_its_line(scratch: Path) -> None:
    blocked = scratch / "blocked"
    (blocked / "doctor" / "version-00000001.safetensors.partial").mkdir(parents=True)
    done = headrace(
        *("doctor", "--gpus", "--cpu"),
        *("--set", "delivery.transport=file", "--set", f"delivery.directory={blocked}"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    row, verdict, _ = done.stdout.splitlines()[-3:]
    assert re.match(r"file +CPU +CPU +1 of 1 .* FAILED: .", row), row
    kept = re.fullmatch(r"0 of 1 transports held; what is left of the other runs is in (\S+)", verdict)
    assert kept is not None, verdict
    log = Path(kept[1]) / "doctor" / "logs" / "trainer-0.log"
    assert "cannot be written: Is a directory" in log.read_text()
    shutil.rmtree(kept[1])

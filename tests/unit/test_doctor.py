"""`headrace doctor` without a run: the map of GPUs and workers, the lines of refusals, and how a run is judged."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.doctor import gpu_lines
from headrace.cli.main import app
from headrace.cli.self_test import NO_GPU, RunResult, failure_of, proofs
from headrace.cluster.placement import Gpu, Host, place
from headrace.config import make_config
from headrace.errors import UserError
from headrace.observe.records import DeliveryRecord, VersionRecord

CONFIG = {"model": {"path": ""}, "task": {"kind": "environment", "factory": "task:Task"}}


def host(gpus: int, name: str = "localhost", memory: int = 80 << 30) -> Host:
    return Host(name, tuple(Gpu(str(index), memory, "NVIDIA X") for index in range(gpus)))


def mapped(hosts: list[Host], *settings: str) -> dict[str, str]:
    return gpu_lines(hosts, place(make_config(CONFIG, settings), hosts))


def test_gpus_are_listed_with_the_workers_on_them() -> None:
    assert mapped([host(3)], "engine.gpus=0-1", "training.gpus=[2]") == {
        "0": "GPU 0, NVIDIA X, 80.0 GiB",
        "1": "GPU 1, NVIDIA X, 80.0 GiB",
        "2": "GPU 2, NVIDIA X, 80.0 GiB",
        "trainer-0": "localhost, GPU 2",
        "engine-0": "localhost, GPU 0",
        "engine-1": "localhost, GPU 1",
    }


def test_one_gpu_is_shared_and_what_is_not_known_is_said() -> None:
    assert mapped([Host("localhost", (Gpu("GPU-abcd"),))]) == {
        "0": "GPU GPU-abcd, memory not known",
        "trainer-0": "localhost, GPU GPU-abcd, shared with engine-0",
        "engine-0": "localhost, GPU GPU-abcd, shared with trainer-0",
    }


def test_gpus_of_several_hosts_are_named_with_their_hosts() -> None:
    found = mapped([host(1, "a"), host(1, "b")])
    assert list(found) == ["a:0", "b:0", "trainer-0", "engine-0"]


def test_without_gpus_the_map_says_none() -> None:
    assert mapped([host(0)]) == {"visible": "none"}


def test_the_map_is_a_section_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found) == ["machine", "packages", "paths", "gpus"]
    assert found["gpus"] == {"visible": "none"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--gpus"], NO_GPU),
        (["--gpus", "--set", "engine.gpus=0-5"], NO_GPU),
        (["--set", "engine.gpus=2"], "[engine] gpus = 2, but there is no GPU"),
        (
            ["--gpus", "--cpu", "--set", "engine.gpus=2"],
            "[engine] gpus: nothing of this side runs on a GPU of this run",
        ),
        (["--cpu"], "--cpu goes together with --gpus"),
    ],
)
def test_what_cannot_be_tested_is_one_line(monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError) as refused:
        CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    assert str(refused.value) == line


def version(number: int, digest: str) -> VersionRecord:
    return VersionRecord(id=number, step=number, digest=digest, published=0.0)


def delivery(number: int, engine: str, **facts: Any) -> DeliveryRecord:
    return DeliveryRecord(**{"version": number, "engine": engine, "accepted": True, "time": 0.0, **facts})


VERSIONS = [version(0, "a"), version(1, "b")]
DELIVERIES = [delivery(number, engine) for number in (0, 1) for engine in ("engine-0", "engine-1")]


def test_a_run_holds_if_every_engine_proved_every_version() -> None:
    assert failure_of(VERSIONS, DELIVERIES, 2) == ""
    assert proofs(VERSIONS, DELIVERIES[:3]) == {0: 2, 1: 1}


def test_what_failed_is_one_line() -> None:
    assert failure_of(VERSIONS, DELIVERIES[:3], 2) == "version 1 was proved by 1 of 2 engines"
    refused = delivery(1, "engine-1", accepted=False, reason="the digest\nis wrong")
    # It counts even if the version was then offered again, and proved.
    assert failure_of(VERSIONS, [*DELIVERIES, refused], 2) == "engine-1 refused version 1: the digest is wrong"
    same = [version(0, "a"), version(1, "a")]
    assert failure_of(same, DELIVERIES, 2) == "no version differs from the one before it"


def test_a_run_without_a_journal_has_no_figures() -> None:
    cells = RunResult(transport="shm", trainer="CPU", engines="CPU", failure="it broke").cells()
    assert list(cells) == ["shm", "CPU", "CPU", "0 of 0", "none", "none", "none", "FAILED: it broke"]

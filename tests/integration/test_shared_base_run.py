"""Runs in which trainer and engine hold the frozen base once: measured, and compared with a run of two copies."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from runs import QUICKSTART, headrace, small_settings, start, worker_pids
from safetensors.numpy import load_file

pytestmark = pytest.mark.slow

WIDER = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 64}
"""Makes the quickstart's model so large that its weights are most of what a process holds beside its libraries."""
VERSIONS = 3


class Measured(NamedTuple):
    """The run, and its trainer and engine as they were measured last."""

    directory: Path
    pss: dict[str, int]
    """The proportional set size of each process, in bytes."""
    mapped: dict[str, dict[str, int]]
    """The figures of each process's mapping of the base."""
    base: int
    """The bytes of the base's segment; 0 if there is none."""


def pss(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(re.search(r"^Pss:\s+(\d+) kB$", text, re.M)[1])  # type: ignore[index]


def mapping(pid: int, segment: str) -> dict[str, int]:
    """The figures of a process's mappings of this file, in bytes."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(segment)
        elif inside and rest.endswith(" kB"):
            found[name] = found.get(name, 0) + 1024 * int(rest.split()[0])
    return found


def measured(directory: Path, model: Path, *more: str) -> Measured:
    settings = small_settings(
        directory,
        f"run.versions={VERSIONS}",
        f"model.path={model}",
        "lora.rank=8",
        "lora.serve=unmerged",
        "buffer.depth=0",
        "training.learning_rate=2e-3",
        "training.checkpoint_every=1",
        "pipeline.launcher=local",
        "evaluate.prompts=0",
        *more,
    )
    process = start("train", str(QUICKSTART), *(word for setting in settings for word in ("--set", setting)))
    run_dir = directory / "run"
    last = Measured(run_dir, {}, {}, 0)
    while process.poll() is None:
        pids = worker_pids(run_dir)
        announced = run_dir / "shared_base.json"
        try:
            segment = json.loads(announced.read_text())["segment"] if announced.exists() else "no segment"
            size = Path(segment).stat().st_size if announced.exists() else 0
            if len(pids) == 2 and (run_dir / "journal.db").exists():
                mapped = {name: mapping(pid, segment) for name, pid in pids.items()}
                last = Measured(run_dir, {name: pss(pid) for name, pid in pids.items()}, mapped, size)
        except (FileNotFoundError, ProcessLookupError, TypeError):
            pass  # A process ended meanwhile.
        time.sleep(0.05)
    _, said = process.communicate()
    assert process.returncode == 0, said
    return last


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    for path in (QUICKSTART.parent / "model").iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | WIDER))
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Measured, Measured]:
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    return measured(one, model, "lora.share_base=true"), measured(two, model)


def test_two_processes_hold_one_copy(runs: tuple[Measured, Measured]) -> None:
    shared, apart = runs
    assert shared.base > 40_000_000 and not apart.base
    assert set(shared.mapped) == {"trainer-0", "engine-0"}
    for figures in shared.mapped.values():
        assert figures["Rss"] > 0.99 * shared.base, "it computes with the base where it lies"
        assert figures["Private_Dirty"] == figures["Swap"] == 0, "and has written to none of it"
    together = sum(figures["Pss"] for figures in shared.mapped.values())
    assert 0.98 * shared.base < together < 1.02 * shared.base, "together they hold it once"
    # Without it each holds its own, and the engine a packed copy besides.
    assert sum(apart.pss.values()) - sum(shared.pss.values()) > 1.5 * shared.base


def test_it_learns_what_it_learns_with_two_copies(runs: tuple[Measured, Measured]) -> None:
    adapters = []
    for run in runs:
        summary = json.loads((run.directory / "summary.json").read_text())
        assert summary["deliveries_proved"] == VERSIONS + 1 and not summary["deliveries_rejected"]
        checkpoint = max((run.directory / "checkpoints").glob("*/adapter_model.safetensors"))
        adapters.append(load_file(checkpoint))
    shared, apart = adapters
    assert shared.keys() == apart.keys()
    for name, tensor in shared.items():
        np.testing.assert_allclose(tensor, apart[name], atol=1e-4)
    assert any(np.abs(tensor).max() > 1e-3 for name, tensor in shared.items() if "lora_B" in name), "it has learned"


def test_its_records_are_the_models_own(runs: tuple[Measured, Measured]) -> None:
    done = headrace("audit", str(runs[0].directory), "--json")
    assert done.returncode == 0, done.stderr
    versions = json.loads(done.stdout)["versions"]
    compared = [version for version in versions if version["tokens"]]
    assert compared and all(version["max_error"] < 1e-3 for version in compared)

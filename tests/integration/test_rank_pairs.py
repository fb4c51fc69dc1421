"""Every grid of ranks with every transport, kind, optimizer and adapter: proved versions, or a documented refusal."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from rank_pairs import TORCHAO, VERSIONS, Grid, configured, walk, write_model
from runs import QUICKSTART, ROOT, headrace, small_settings

from headrace.config.schema import DeliveryConfig, LoraConfig, TrainingConfig, names_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:OptimState8bit")]

GRIDS = {"one": Grid(1), "two": Grid(2), "four": Grid(4), "tensor": Grid(2, 2), "wrapped": Grid(1, wrapped=True)}
FULL, DELTA = ("delivery.send=full",), ("delivery.send=delta", "delivery.dtype=bfloat16")
MERGED, UNMERGED = ("lora.rank=4", "lora.serve=merged"), ("lora.rank=4", "lora.serve=unmerged")
NF4 = ("lora.base=nf4",)
CASES = {
    "shm-full-adamw": ("shm", "adamw", *FULL),
    "tcp-delta-8bit": ("tcp", "adamw_8bit", *DELTA),
    "file-delta-muon": ("file", "muon", *DELTA),
    "nccl-delta-adamw": ("nccl", "adamw", *DELTA),
    "nccl-merged-8bit": ("nccl", "adamw_8bit", *MERGED),
    "shm-unmerged-muon": ("shm", "muon", *UNMERGED),
    "tcp-merged-nf4": ("tcp", "adamw", *MERGED, *NF4),
    "file-unmerged-nf4": ("file", "adamw_8bit", *UNMERGED, *NF4),
    "nccl-full-muon": ("nccl", "muon", *FULL),
    "shm-delta-8bit": ("shm", "adamw_8bit", *DELTA),
}
SETTINGS = {
    name: [f"delivery.transport={transport}", f"training.optimizer={optimizer}", *more]
    for name, (transport, optimizer, *more) in CASES.items()
}
NEEDS_GPUS = {"cuda_ipc": "the GPUs of one host"}
"""The transports that no grid of CPUs can use, and what their line in the docs says."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("pairs") / "model")


@pytest.mark.parametrize("grid", GRIDS)
def test_every_pair_proves_its_versions(tmp_path: Path, model: Path, grid: str) -> None:
    ranks = GRIDS[grid]
    for name, told in walk(tmp_path, model, ranks, SETTINGS).items():
        assert [proof.reason for proof in told.proofs] == [""] * VERSIONS, name
        assert all(proof.accepted for proof in told.proofs), name
        for manifest in told.manifests:
            assert len(manifest.parts) == ranks.parts, name
            sizes = [sum(entry.nbytes for entry in part.entries) for part in manifest.parts]
            assert sum(sizes) in (0, sum(entry.nbytes for entry in manifest.entries)), name
        kinds = [manifest.kind for manifest in told.manifests]
        if "lora.rank=4" in SETTINGS[name]:
            assert kinds == ["adapter"] * VERSIONS
            changed = [tensor for key, tensor in told.weights.items() if "lora_B" in key]
            assert changed and all(tensor.abs().max() > 0 for tensor in changed), name
        elif "delivery.send=delta" in SETTINGS[name]:
            assert kinds == ["full", "delta", "delta"], name
        else:
            assert kinds == ["full"] * VERSIONS


def test_the_cases_hold_every_value_of_every_key() -> None:
    """Each transport, kind, optimizer and way to serve an adapter is in a case, so it meets every grid."""
    used = set(itertools.chain.from_iterable(SETTINGS.values()))
    optimizers = TrainingConfig.__annotations__["optimizer"]
    assert TORCHAO.is_dir()
    for section, key, values in (
        ("delivery", "transport", set(names_of(DeliveryConfig, "transport") or ()) - {"auto", *NEEDS_GPUS}),
        ("training", "optimizer", set(optimizers.__args__)),
        ("delivery", "send", set(DeliveryConfig.__annotations__["send"].__args__)),
        ("lora", "serve", set(LoraConfig.__annotations__["serve"].__args__)),
    ):
        assert {f"{section}.{key}={value}" for value in values} <= used
    assert "lora.base=nf4" in used


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_no_pair_is_refused_by_the_configuration(tmp_path: Path, model: Path, grid: str, settings: list[str]) -> None:
    assert configured(tmp_path, model, [*GRIDS[grid].settings, *settings]).training.processes == GRIDS[grid].ranks


WHOLE_RUNS = {
    "deltas": ("training.ranks=2", "delivery.send=delta", "delivery.dtype=bfloat16", "engine.count=2"),
    "broadcasts": ("training.ranks=2", "delivery.transport=nccl", "engine.count=2"),
    "adapter": ("training.ranks=2", "training.tensor_parallel=2", "lora.rank=4", "lora.serve=unmerged"),
    "four-bits": ("training.ranks=2", "lora.rank=4", "lora.base=nf4"),
}
"""Whole runs, with their controller: one for each of the parts that a trainer and an engine alone do not show."""


@pytest.mark.parametrize("name", WHOLE_RUNS)
def test_whole_runs_prove_their_versions(tmp_path: Path, name: str) -> None:
    changes = (*WHOLE_RUNS[name], "run.versions=2", "evaluate.prompts=0", "training.checkpoint_every=1")
    settings = [part for setting in small_settings(tmp_path, *changes) for part in ("--set", setting)]
    run = headrace("train", str(QUICKSTART), *settings, "--json")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    engines = 2 if "engine.count=2" in changes else 1
    assert (summary["deliveries_proved"], summary["deliveries_rejected"]) == (3 * engines, 0)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("transport", NEEDS_GPUS)
def test_what_needs_gpus_is_refused_in_a_line_of_the_docs(tmp_path: Path, transport: str, grid: str) -> None:
    changes = [*GRIDS[grid].settings, f"delivery.transport={transport}", "training.device=cpu", "engine.device=cpu"]
    settings = [part for setting in small_settings(tmp_path, *changes) for part in ("--set", setting)]
    run = headrace("train", str(QUICKSTART), *settings)
    assert run.returncode == 2, run.stderr
    [line] = run.stderr.strip().splitlines()
    assert f'[delivery] transport = "{transport}"' in line and "GPU" in line
    assert f"| `{transport}` | {NEEDS_GPUS[transport]} |" in (ROOT / "docs" / "delivery.md").read_text()

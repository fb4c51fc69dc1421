"""Runs with an adapter: what engines serve is the trainer's model, only the adapter travels, and exports load."""

from __future__ import annotations

import json
import sqlite3
import threading
import uuid
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from peft import PeftModel
from runs import headrace, small_config
from tiny_models import make_model, plain, prompts, reference_logprobs, request, run_out
from transformers import AutoModelForCausalLM

from headrace import Run
from headrace.config.schema import AlgorithmConfig, EngineConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import WITHOUT_GPU, sender
from headrace.delivery.transports.base import SenderSettings
from headrace.engines.embedded.core import EngineCore
from headrace.models.attention import check_model
from headrace.models.lora import Adapter, frozen_linears
from headrace.models.rounding import round_weights
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.review.audit import audit
from headrace.review.recompute import PlainModel
from headrace.training.checkpoints.base import base_of
from headrace.training.lora import TrainedAdapter
from headrace.training.trainer import Trainer

pytestmark = pytest.mark.slow

EXPERTS = ["all-linear", "experts.gate_up_proj", "experts.down_proj"]
CANARY = np.arange(1, 12, dtype=np.int32)


def trainer_of(family: str, lora: LoraConfig, **changes: Any) -> Trainer:
    model = make_model(family, **changes)
    adapter = TrainedAdapter(model, lora, base=Path("base"))
    trainer = Trainer(
        model, AlgorithmConfig(), TrainingConfig(), total_steps=1, warm_start=WarmStartConfig(), adapter=adapter
    )
    noise = torch.Generator().manual_seed(1)
    for tensor in trainer.weights().values():
        tensor.add_(0.2 * torch.randn(tensor.shape, generator=noise))
    return trainer


@pytest.mark.parametrize("serve", ["merged", "unmerged"])
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", LoraConfig(rank=4)),
        ("qwen3", LoraConfig(rank=2, alpha=2.0, targets=["q_proj", "down_proj"], modules=["norm", "lm_head"])),
        ("qwen3_moe", LoraConfig(rank=2, alpha=2.0, targets=EXPERTS)),
        ("gpt_oss", LoraConfig(rank=2, alpha=2.0, targets=["experts.gate_up_proj", "experts.down_proj"])),
    ],
)
def test_the_engine_serves_the_trainers_model(
    family: str, lora: LoraConfig, serve: Literal["merged", "unmerged"]
) -> None:
    changes = {"tie_word_embeddings": False}
    trainer = trainer_of(family, lora, **changes)
    model = make_model(family, **changes)
    adapter = Adapter(model, lora, serve)
    check_model(model)
    core = EngineCore(model, EngineConfig(slots=4, block_size=4), name="e", max_length=64, adapter=adapter)
    publisher = Publisher(sender("shm", SenderSettings(run_id=uuid.uuid4().hex[:8])), "float32", 1e-4, CANARY)
    try:
        manifest = publisher.publish(0, -1, 0, trainer.weights(), trainer.score).result(30)
        proof = core.swap(core.stage(manifest))
    finally:
        publisher.close()
    assert proof.accepted, proof.reason
    given = prompts([5, 9])
    core.submit(request(f"{i}", p, 12, seed=i) for i, p in enumerate(given))
    for i, delta in run_out(core).items():
        whole = np.concatenate([given[int(i)], delta.token_ids])
        expected = trainer.score(whole)[len(given[int(i)]) - 1 :]
        np.testing.assert_allclose(delta.logprobs, expected, atol=1e-4)
        base = reference_logprobs(plain(make_model(family, **changes)), given[int(i)], delta.token_ids)
        assert np.abs(base[np.arange(12), delta.token_ids] - expected).max() > 0.05, "the adapter must matter"
    core.close()


@pytest.mark.parametrize("transport", WITHOUT_GPU)
def test_what_travels_is_the_adapter(tmp_path: Path, transport: str) -> None:
    trainer = trainer_of("llama", LoraConfig(rank=16), hidden_size=256, intermediate_size=512)
    own = sum(tensor.nbytes for tensor in trainer.weights().values())
    publisher = Publisher(
        sender(transport, SenderSettings(run_id=uuid.uuid4().hex[:8], directory=tmp_path / "weights")),
        "float32",
        1e-3,
        CANARY,
    )
    try:
        manifest = publisher.publish(0, -1, 0, trainer.weights(), trainer.score).result(30)
        assert own <= max(entry.offset + entry.nbytes for entry in manifest.entries) <= 1.02 * own
        if transport in ("shm", "file"):
            assert own <= Path(manifest.location).stat().st_size <= 1.02 * own
    finally:
        publisher.close()


class Weights(threading.Thread):
    """The sizes of the files that a run delivers through a directory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory, self.over, self.sizes = directory, threading.Event(), {}  # type: ignore[var-annotated]

    def run(self) -> None:
        while not self.over.wait(0.01):
            for path in self.directory.rglob("*"):
                try:
                    self.sizes[path.name] = path.stat().st_size
                except FileNotFoundError:
                    continue


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    directory = tmp_path_factory.mktemp("runs")
    config = small_config(
        directory,
        "run.versions=3",
        "lora.rank=16",
        "training.learning_rate=2e-3",
        "training.checkpoint_every=1",
        "training.keep_checkpoints=20",
        "delivery.transport=file",
        f"delivery.directory={directory / 'weights'}",
        "evaluate.prompts=0",
    )
    watcher = Weights(directory / "weights")
    watcher.start()
    try:
        outcome = start_run(config, NoProgress())
    finally:
        watcher.over.set()
        watcher.join(60)
    assert outcome.outcome == "finished"
    return outcome.run_dir.path, watcher.sizes


def rows(run_dir: Path, sql: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return db.execute(sql).fetchall()


def test_a_run_delivers_and_proves_the_adapter_alone(finished: tuple[Path, dict[str, int]]) -> None:
    run_dir, sizes = finished
    assert rows(run_dir, "SELECT version, accepted FROM deliveries ORDER BY version") == [(v, 1) for v in range(4)]
    newest = max((run_dir / "checkpoints").glob("step-*"))
    own = (newest / "adapter_model.safetensors").stat().st_size
    assert sizes and max(sizes.values()) <= 1.02 * own
    # The base is what the configuration alone gives: nothing of the run has touched it.
    kept = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "base")
    steps = {path.name: json.loads((path / "adapter_config.json").read_text()) for path in newest.parent.glob("step-*")}
    assert {Path(config["base_model_name_or_path"]) for config in steps.values()} == {newest.parent / "base"}
    torch.manual_seed(0)
    drawn = AutoModelForCausalLM.from_config(kept.config)
    for name, parameter in drawn.named_parameters():
        assert torch.equal(parameter, kept.get_parameter(name)), name


def test_what_was_recorded_is_what_the_adapters_give(finished: tuple[Path, dict[str, int]]) -> None:
    """Digests and log-probabilities, by plain peft over plain Hugging Face."""
    found = audit(finished[0], PlainModel, samples=1000, tolerance=1e-4)
    assert found.passed, found.problems
    assert found.compared > 100


def test_the_command_line_exports(finished: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    run_dir, out = finished[0], tmp_path / "model"
    done = headrace("export", str(run_dir), "--to", "hf", "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    newest = max((run_dir / "checkpoints").glob("step-*"))
    assert json.loads(done.stdout) == {"checkpoint": newest.name, "format": "hf", "directory": str(out)}
    base = AutoModelForCausalLM.from_pretrained(run_dir / "checkpoints" / "base").eval()
    merged = AutoModelForCausalLM.from_pretrained(out).eval()
    ids = np.arange(3, 19, dtype=np.int32)
    before = reference_logprobs(base, ids[:1], ids[1:])
    adapted = reference_logprobs(PeftModel.from_pretrained(base, newest).eval(), ids[:1], ids[1:])
    np.testing.assert_allclose(reference_logprobs(merged, ids[:1], ids[1:]), adapted, atol=1e-5)
    assert np.abs(adapted - before).max() > 1e-3
    wrong = headrace("export", str(run_dir), "--to", "hf", "--checkpoint", "step-99")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("headrace: --checkpoint step-99: there is none of this name; there are step-")


def test_a_run_beside_a_base_in_four_bits(tmp_path: Path) -> None:
    """Engines serve what the trainer holds, plain peft finds it beside the checkpoints, and both say the same."""
    config = small_config(
        tmp_path,
        "run.versions=2",
        "buffer.depth=0",
        "lora.rank=8",
        "lora.base=nf4",
        "training.learning_rate=2e-3",
        "training.checkpoint_every=1",
        "training.keep_checkpoints=9",
        "evaluate.prompts=0",
    )
    run_dir = start_run(config, NoProgress()).run_dir.path
    assert rows(run_dir, "SELECT version, accepted FROM deliveries ORDER BY version") == [(v, 1) for v in range(3)]
    for step in Run(run_dir).history:
        assert step["ratio"] == pytest.approx(1.0, abs=1e-4)
    found = audit(run_dir, PlainModel, samples=1000, tolerance=1e-4)
    assert found.passed, found.problems
    assert found.compared > 50
    torch.manual_seed(0)
    kept = AutoModelForCausalLM.from_pretrained(base_of(max((run_dir / "checkpoints").glob("step-*"))))
    drawn = AutoModelForCausalLM.from_config(kept.config)
    rounded = frozen_linears(drawn)
    assert any(not torch.equal(layer.weight, kept.get_submodule(name).weight) for name, layer in rounded.items())
    round_weights(rounded)
    for name, parameter in drawn.named_parameters():
        assert torch.equal(parameter, kept.get_parameter(name)), name

"""An adapter that several ranks train is what one rank trains; its checkpoint is one rank's, and plain peft's."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from peft import PeftModel
from rank_cases import (
    TRAINING,
    AllDouble,
    Case,
    Result,
    make_trainer,
    model_dir,
    on_ranks,
    read_tensors,
    tell_tensors,
    train,
    whole_weights,
)
from runs import QUICKSTART, headrace, small_settings
from transformers import AutoModelForCausalLM

from headrace.config.schema import AlgorithmConfig, LoraConfig
from headrace.training.checkpoints.base import latest
from headrace.training.ranks import Ranks
from headrace.training.trainer import Trainer

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=3, alpha=6.0, modules=["norm"])
WITH_REFERENCE = AlgorithmConfig(loss="grpo", kl="k3", kl_weight=0.1)
TOLERANCE = 1e-8


def make(path: Path, ranks: Ranks | None, lora: LoraConfig = LORA) -> Trainer:
    # What is dropped depends on the order of the rows, which is another one on several ranks. So there is only one.
    training = msgspec.structs.replace(TRAINING, micro_batch_tokens=4096) if lora.dropout else TRAINING
    return make_trainer(path, ranks, Case(WITH_REFERENCE, training, lora=lora))


def begin_and_save(ranks: Ranks, path: Path, model_path: Path, checkpoints: Path, lora: LoraConfig = LORA) -> None:
    trainer = make(model_path, ranks, lora)
    first = train(trainer, 0, 3)
    saving = trainer.begin_save(checkpoints, version=3, source=model_path)
    rest = train(trainer, 3, 6)  # Goes on: what is saved is what was.
    saving.result(timeout=120)
    tell(path, ranks, trainer, Result(first.losses + rest.losses, first.norms + rest.norms, []))


def go_on(ranks: Ranks, path: Path, model_path: Path, checkpoint: Path, lora: LoraConfig = LORA) -> None:
    trainer = make(model_path, ranks, lora)
    trainer.load(checkpoint)
    tell(path, ranks, trainer, train(trainer, 3, 6))


def tell(path: Path, ranks: Ranks, trainer: Trainer, result: Result) -> None:
    (path / f"result-{ranks.rank}.json").write_bytes(msgspec.json.encode(result))
    tell_tensors(ranks, path, {"weights": whole_weights(trainer)})
    trainer.close()
    ranks.meet()


def assert_told(path: Path, ranks: int, losses: list[float], weights: dict[str, torch.Tensor]) -> None:
    for rank in range(ranks):
        result = msgspec.json.decode((path / f"result-{rank}.json").read_bytes(), type=Result)
        assert result.losses == pytest.approx(losses, rel=0, abs=TOLERANCE)
        found = read_tensors(path / f"rank-{rank}.tensors")["weights"]
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 2), (4, 2)])
def test_an_adapter_is_cut_over_tensor_ranks(tmp_path: Path, ranks: int, tensor_parallel: int) -> None:
    """Modules trained in full beside it, of which one is cut too. Ranks that share all rows drop what one drops."""
    path = model_dir(tmp_path / "model", "qwen3")
    dropout = 0.0 if ranks > tensor_parallel else 0.2
    lora = LoraConfig(rank=3, alpha=6.0, modules=["norm", "embed_tokens", "q_norm"], dropout=dropout)
    alone = make(path, None, lora)
    losses = train(alone, 0, 6).losses
    on_ranks(tmp_path / "ranks", ranks, tensor_parallel, begin_and_save, path, tmp_path / "checkpoints", lora)
    assert_told(tmp_path / "ranks", ranks, losses, alone.weights())
    saved = latest(tmp_path / "checkpoints")
    assert saved is not None
    again = make(path, None, lora)
    again.load(saved)
    assert train(again, 3, 6).losses == pytest.approx(losses[3:], rel=0, abs=TOLERANCE)
    for name, tensor in alone.weights().items():
        torch.testing.assert_close(again.weights()[name], tensor, rtol=0, atol=TOLERANCE, msg=name)
    if not dropout:
        on_ranks(tmp_path / "two", 2, 1, go_on, path, saved, lora)
        assert_told(tmp_path / "two", 2, losses[3:], alone.weights())


def test_adapters_of_experts_are_the_same_on_every_tensor_rank(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model", "mixtral")
    lora = LoraConfig(rank=2, alpha=4.0, targets=["q_proj", "o_proj", "experts.down_proj"])
    alone = make(path, None, lora)
    losses = train(alone, 0, 6).losses
    on_ranks(tmp_path / "ranks", 2, 2, begin_and_save, path, tmp_path / "checkpoints", lora)
    assert_told(tmp_path / "ranks", 2, losses, alone.weights())


@pytest.mark.parametrize(("ranks", "tensor_parallel"), [(2, 1), (2, 2), (4, 2)])
def test_a_base_in_four_bits_is_that_of_one_rank(tmp_path: Path, ranks: int, tensor_parallel: int) -> None:
    path = model_dir(tmp_path / "model", "qwen3")
    lora = LoraConfig(rank=3, alpha=6.0, base="nf4")
    alone = make(path, None, lora)
    losses = train(alone, 0, 6).losses
    on_ranks(tmp_path / "ranks", ranks, tensor_parallel, begin_and_save, path, tmp_path / "checkpoints", lora)
    assert_told(tmp_path / "ranks", ranks, losses, alone.weights())
    again = make(path, None, lora)
    again.load(latest(tmp_path / "checkpoints"))
    assert train(again, 3, 6).losses == pytest.approx(losses[3:], rel=0, abs=TOLERANCE)


def test_ranks_train_the_adapter_that_one_rank_trains(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model", "qwen3")
    alone = make(path, None)
    start = {name: tensor.clone() for name, tensor in alone.weights().items()}
    losses = train(alone, 0, 6).losses
    assert all(not torch.equal(tensor, start[name]) for name, tensor in alone.weights().items())

    on_ranks(tmp_path / "two", 2, 1, begin_and_save, path, tmp_path / "checkpoints")
    assert_told(tmp_path / "two", 2, losses, alone.weights())
    saved = latest(tmp_path / "checkpoints")
    assert saved is not None
    on_ranks(tmp_path / "four", 4, 1, go_on, path, saved)
    assert_told(tmp_path / "four", 4, losses[3:], alone.weights())

    again = make(path, None)
    again.load(saved)
    middle = {name: tensor.clone() for name, tensor in again.weights().items()}
    assert train(again, 3, 6).losses == pytest.approx(losses[3:], rel=0, abs=TOLERANCE)
    for name, tensor in alone.weights().items():
        torch.testing.assert_close(again.weights()[name], tensor, rtol=0, atol=TOLERANCE, msg=name)

    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), saved)
    ids = torch.arange(3, 20)
    for name, tensor in again.weights().items():
        tensor.copy_(middle[name])
    with torch.no_grad(), AllDouble():
        logprobs = plain(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[1:, None])[:, 0].float()
        torch.testing.assert_close(torch.from_numpy(again.score(ids.int().numpy())), expected, rtol=0, atol=1e-5)


def test_a_run_of_two_ranks_delivers_its_adapter_and_one_rank_goes_on(tmp_path: Path) -> None:
    changes = (
        "training.ranks=2",
        "lora.rank=4",
        "lora.dropout=0.1",
        "run.versions=2",
        "evaluate.prompts=0",
        "buffer.depth=0",
        "training.checkpoint_every=1",
    )
    settings = [part for setting in small_settings(tmp_path, *changes) for part in ("--set", setting)]
    run = headrace("train", str(QUICKSTART), *settings, "--json")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert (summary["deliveries_proved"], summary["deliveries_rejected"]) == (3, 0)
    exported = headrace("export", str(tmp_path / "run"), "--to", "peft", "--out", str(tmp_path / "adapter"))
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    again = headrace("resume", str(tmp_path / "run"), "--set", "training.ranks=1", "--set", "run.versions=3", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["deliveries_rejected"] == 0

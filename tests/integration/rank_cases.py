"""What the ranks of a sharded trainer do in tests, in processes of their own, and the one rank that they must equal."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "unit" / "training"))

from random_models import AllDouble, in_minibatches, model_dir, random_batch, with_credit, with_experts, with_rewards

from forked_processes import PROCESSES
from headrace.channel.codec import encode
from headrace.config.schema import AlgorithmConfig, LoraConfig, TrainingConfig, WarmStartConfig
from headrace.delivery.base import Manifest, canary_sequence
from headrace.delivery.parts import TrainerRanks
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.errors import DeliveryError
from headrace.models.loading import load_model
from headrace.models.lora import frozen_linears
from headrace.models.rounding import hold_in_four_bits, round_weights
from headrace.training.checkpoints.base import latest
from headrace.training.checkpoints.saving import CRITIC_FILE
from headrace.training.lora import TrainedAdapter
from headrace.training.ranks import Ranks, join
from headrace.training.serving import prepare_model
from headrace.training.trainer import Trainer
from headrace.types import Batch

TRAINING = TrainingConfig(learning_rate=1e-3, micro_batch_tokens=32, clip_norm=0.5, weight_decay=0.01)
CANARY = canary_sequence(61, 8)
RESEND = -1


class Case(msgspec.Struct, frozen=True):
    """What is trained, and how."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    training: TrainingConfig = TRAINING
    warm: int = 0
    """Supervised steps, before those of the policy."""
    steps_per_version: int = 1
    epochs: int = 0
    """How often two minibatches of each batch are trained; 0 leaves the batch whole."""
    credit: bool = False
    """Whether every token has an advantage of its own."""
    lora: LoraConfig | None = None
    """The adapter that is trained, if not all weights are."""


PLAIN = Case()
MUON = msgspec.structs.replace(TRAINING, optimizer="muon")
KL = AlgorithmConfig(loss="grpo", kl="k3", kl_weight=0.5)
CASES = {
    "kl": Case(KL),
    "recomputed": Case(AlgorithmConfig(loss="decoupled_ppo", proximal="recomputed"), steps_per_version=2),
    "distillation": Case(AlgorithmConfig(loss="distillation", teacher="teacher")),
    "likeliest": Case(
        AlgorithmConfig(teacher="teacher", teacher_divergence="reverse", teacher_top_k=5, teacher_weight=0.5)
    ),
    "muon": Case(training=MUON),
}


class Result(msgspec.Struct):
    losses: list[float]
    norms: list[float]
    metrics: list[dict[str, float]]


def on_ranks(path: Path, ranks: int, tensor_parallel: int, target: Callable[..., None], *arguments: Any) -> None:
    """Run `target(ranks, path, *arguments)` on every rank; all must end well."""
    path.mkdir(parents=True, exist_ok=True)
    processes = start_ranks(path, ranks, tensor_parallel, target, *arguments)
    for process in processes:
        process.join(timeout=200)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks


def in_turn(ranks: Ranks, path: Path, target: Callable[..., None], arguments: dict[str, tuple[Any, ...]]) -> None:
    """`target` with each of these arguments, in a directory of its own below `path`, on ranks that have met once."""
    for name, given in arguments.items():
        (path / name).mkdir(exist_ok=True)
        target(ranks, path / name, *given)


def start_ranks(
    path: Path, ranks: int, tensor_parallel: int, target: Callable[..., None], *arguments: Any
) -> list[Any]:
    processes = [
        PROCESSES.Process(target=_one_rank, args=(path, rank, ranks, tensor_parallel, target, arguments), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def _one_rank(path: Path, rank: int, ranks: int, tensor_parallel: int, target: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    place = join(path / "store", rank, ranks, tensor_parallel=tensor_parallel, device="cpu", timeout=120)
    target(place, path, *arguments)
    place.leave()


def make_trainer(model_path: Path, ranks: Ranks | None, case: Case = PLAIN) -> Trainer:
    """A teacher is found beside the model, by its name."""
    model = load_model(model_path, dtype="float64")
    if hasattr(model.config, "num_local_experts"):
        # Experts one by one: the grouped kernels do not have float64.
        model.set_experts_implementation("eager")
    adapter = None if case.lora is None else _make_adapter(model, case.lora, model_path)
    prepare_model(model, case.training, ranks)
    teacher = case.algorithm.teacher
    return Trainer(
        model,
        case.algorithm,
        case.training,
        total_steps=20,
        warm_start=WarmStartConfig(),
        teacher=load_model(model_path.with_name(teacher), dtype="float64") if teacher else None,
        ranks=ranks,
        adapter=adapter,
    )


def _make_adapter(model: Any, lora: LoraConfig, base: Path) -> TrainedAdapter:
    if lora.base == "nf4":
        layers = frozen_linears(model, tuple(lora.modules))
        round_weights(layers)
        hold_in_four_bits(model, layers)
    adapter = TrainedAdapter(model, lora, base=base)
    model.double()  # The adapter of a layer in 4 bits is float32.
    return adapter


def train(trainer: Trainer, first: int, last: int, case: Case = PLAIN) -> Result:
    """Steps first + 1 .. last, on two batches in turn: few shapes, which sharded operations learn once each.

    A model with experts has those of every other batch from its record.
    """
    routes = hasattr(trainer.model.config, "num_local_experts")
    batches = [_batch(step, case) for step in range(first + 1, last + 1)]
    with AllDouble():
        reports = [trainer.step(with_experts(b) if routes and b.step % 2 else b) for b in batches]
    return Result([r.loss for r in reports], [r.grad_norm for r in reports], [r.metrics for r in reports])


def _batch(step: int, case: Case) -> Batch:
    objective = "imitation" if step <= case.warm else "policy"
    batch = random_batch(step % 2, step=step, temperature=0.9, objective=objective)
    batch = msgspec.structs.replace(batch, version=-(-step // case.steps_per_version))
    if case.algorithm.critic:
        batch = with_rewards(batch)
    if case.credit:
        batch = with_credit(batch)
    return in_minibatches(batch, case.epochs) if case.epochs else batch


def whole_weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()
        for name, tensor in trainer.weights().items()
    }


def value_head(directory: Path) -> dict[str, torch.Tensor]:
    """Return the critic's head and its moments from the latest checkpoint in this directory."""
    saved = latest(directory)
    assert saved is not None
    return load_file(saved / CRITIC_FILE)


def tell_tensors(ranks: Ranks, path: Path, found: dict[str, Any]) -> None:
    """Write what this rank found: tensors, and dicts of tensors."""
    flat = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    for name in found.keys() - flat.keys():
        flat |= {f"{name}/{key}": tensor.contiguous() for key, tensor in found[name].items()}
    save_file(flat, path / f"rank-{ranks.rank}.tensors")


def read_tensors(file: Path) -> dict[str, Any]:
    """Return what a rank wrote with `tell_tensors`."""
    found: dict[str, Any] = {"weights": {}}
    for name, tensor in load_file(file).items():
        kind, slash, key = name.partition("/")
        if slash:
            found[kind][key] = tensor
        else:
            found[name] = tensor
    return found


def train_and_tell(ranks: Ranks, path: Path, model_path: Path, steps: int, case: Case = PLAIN) -> None:
    trainer = make_trainer(model_path, ranks, case)
    result = train(trainer, 0, steps, case)
    sound = with_rewards(random_batch(1)) if case.algorithm.critic else random_batch(1)
    poisoned, silent = (copy.deepcopy(sound) for _ in range(2))
    if ranks.data == 0:
        # Only one rank sees what is not finite: all must skip.
        poisoned.weights[poisoned.trained] = float("nan")
        # A loss that is not a number, whose gradient is zero at that token: all must skip, too.
        silent.logprobs[silent.trained] = float("nan")
    before = whole_weights(trainer)
    with pytest.MonkeyPatch.context() as patch:
        # A batch with such numbers is refused before it is trained. Here they stand for what a pass may compute.
        patch.setattr("headrace.training.trainer.check_numbers", lambda _: None)
        assert trainer.step(poisoned).skipped
        assert trainer.step(silent).skipped
    after = whole_weights(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with AllDouble():
        scores = trainer.score(CANARY)
    (path / f"result-{ranks.rank}.json").write_bytes(msgspec.json.encode(result))
    tell_tensors(ranks, path, {"weights": after, "scores": torch.from_numpy(scores)})
    if case.algorithm.critic:
        trainer.save(path / "saved", source=model_path)


def train_and_save(
    ranks: Ranks, path: Path, model_path: Path, checkpoints: Path, steps: int, case: Case = PLAIN
) -> None:
    trainer = make_trainer(model_path, ranks, case)
    train(trainer, 0, steps, case)
    saving = trainer.begin_save(checkpoints, version=7, source=model_path)
    train(trainer, steps, steps + 1, case)  # Goes on: what is saved is what was.
    saving.result(timeout=120)
    trainer.close()
    ranks.meet()


def load_and_train(
    ranks: Ranks, path: Path, model_path: Path, checkpoint: Path, first: int, last: int, case: Case = PLAIN
) -> None:
    trainer = make_trainer(model_path, ranks, case)
    trainer.load(checkpoint)
    result = train(trainer, first, last, case)
    (path / f"result-{ranks.rank}.json").write_bytes(msgspec.json.encode(result))
    tell_tensors(ranks, path, {"weights": whole_weights(trainer)})
    if case.algorithm.critic:
        trainer.save(path / "saved", source=model_path)


def load_and_save(
    ranks: Ranks, path: Path, model_path: Path, checkpoint: Path, directory: Path, first: int, last: int
) -> None:
    trainer = make_trainer(model_path, ranks)
    trainer.load(checkpoint)
    result = train(trainer, first, last)
    (path / f"result-{ranks.rank}.json").write_bytes(msgspec.json.encode(result))
    tell_tensors(ranks, path, {})
    trainer.save(directory, source=model_path)
    trainer.close()
    ranks.meet()


def publish(ranks: Ranks, path: Path, model_path: Path, transport: str, told: Any, done: Any) -> None:
    """Publish version 3 in float32; the first rank hands the manifest over."""
    trainer = make_trainer(model_path, ranks)
    end = sender(transport, SenderSettings(run_id=path.name, directory=path / f"weights-{ranks.rank}"))
    together = TrainerRanks(ranks.publishing, ranks.resending, ranks.coordinate)
    publisher = Publisher(end, "float32", 1e-3, CANARY, deadline=30, ranks=together)
    manifest = publisher.publish(3, 2, 1, trainer.weights(), trainer.score).result(timeout=120)
    tell_tensors(ranks, path, {"weights": whole_weights(trainer)})
    assert publisher.announces == (ranks.rank == 0)
    if publisher.announces:
        told.put([bytes(frame) for frame in encode(manifest)])
    assert done.wait(timeout=120)
    publisher.acknowledged(3)
    publisher.close()


def publish_deltas(ranks: Ranks, path: Path, model_path: Path, transport: str, told: Any, heard: list[Any]) -> None:
    """Publish versions 1, 2 and 3 as deltas in bfloat16. Version 2 is sent again whole while version 3 waits for it."""
    trainer = make_trainer(model_path, ranks)
    end = sender(transport, SenderSettings(run_id=path.name, directory=path / f"weights-{ranks.rank}"))
    together = TrainerRanks(ranks.publishing, ranks.resending, ranks.coordinate)
    publisher = Publisher(end, "bfloat16", 1.0, CANARY, send="delta", deadline=60, ranks=together)

    def tell(manifest: Manifest) -> None:
        if publisher.announces:
            told.put([bytes(frame) for frame in encode(manifest)])

    def acknowledge(version: int) -> None:
        assert heard[ranks.rank].get(timeout=120) == version
        publisher.acknowledged(version)

    first = publisher.publish(1, 0, 0, trainer.weights(), trainer.score).result(timeout=120)
    tell(first)
    acknowledge(1)
    train(trainer, 0, 1)
    second = publisher.publish(2, 1, 1, trainer.weights(), trainer.score).result(timeout=120)
    tell(second)
    train(trainer, 1, 2)
    waiting = publisher.publish(3, 2, 2, trainer.weights(), trainer.score)
    assert heard[ranks.rank].get(timeout=120) == RESEND
    tell(publisher.resend(second).result(timeout=120))
    assert not waiting.done()
    acknowledge(2)
    tell(waiting.result(timeout=120))
    acknowledge(3)
    with pytest.raises(DeliveryError, match="version 1 cannot be sent any more"):
        publisher.resend(first).result(timeout=120)
    publisher.close()


__all__ = ["CANARY", "model_dir"]

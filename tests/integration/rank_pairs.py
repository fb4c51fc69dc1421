"""Trainers of one or several ranks that publish to a real engine, for every way of sending, stepping and adapting.

All cases of one grid of ranks run in turn in the same processes. Trainer and publisher are built as in a run.
"""

from __future__ import annotations

import queue
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from rank_cases import PROCESSES, join, random_batch
from runs import QUICKSTART
from transformers import AutoModelForCausalLM, Qwen3Config

from headrace.channel.codec import decode, encode
from headrace.config import Config, load_config
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.digest import digest_as
from headrace.delivery.plan import dtype_of
from headrace.delivery.setup import prepare
from headrace.delivery.transports.tcp_wire import KEYS
from headrace.engines.embedded.core import EngineCore
from headrace.models.loading import load_model, named_weights
from headrace.models.lora import Adapter, frozen_linears
from headrace.models.rounding import round_weights, rounded
from headrace.training.serving import build_trainer, make_publisher

VERSIONS = 3
"""The weights before the first step, and those after each of two steps."""
SECONDS = 120
TORCHAO = Path(sys.prefix) / "torchao"
"""Where `make setup` puts torchao."""


class Grid(msgspec.Struct, frozen=True):
    """A grid of trainer ranks."""

    ranks: int
    tensor_parallel: int = 1
    wrapped: bool = False
    """Whether the model of a single rank is sharded over this one rank, as it is with `[training] offload`."""

    @property
    def parts(self) -> int:
        """In how many parts a version is published."""
        return self.ranks if self.ranks > 1 or self.wrapped else 0

    @property
    def settings(self) -> list[str]:
        return [f"training.ranks={self.ranks}", f"training.tensor_parallel={self.tensor_parallel}"]


class Told(msgspec.Struct):
    """What a grid's engine answered, and the weights of its last version."""

    manifests: list[Manifest]
    proofs: list[Proof]
    weights: dict[str, torch.Tensor]


def write_model(path: Path) -> Path:
    """A model whose matrices are large enough that the moments of a quarter of them are kept in 8 bits."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    made = Qwen3Config(**sizes, **heads, initializer_range=0.2, pad_token_id=None, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text("{}")
    return path


def configured(directory: Path, model: Path, settings: list[str]) -> Config:
    """The configuration of one case. Its learning rate is so large that both steps show in 16 bits too."""
    common = [
        f"model.path={model}",
        "model.weights=load",
        "training.learning_rate=1e-3",
        "delivery.canary_tolerance=1e-3",
    ]
    return load_config(QUICKSTART, [f"run.directory={directory}", *common, *settings])


def walk(path: Path, model: Path, grid: Grid, cases: dict[str, list[str]]) -> dict[str, Told]:
    """Let the ranks of a grid publish all versions of all cases, and one engine prove them."""
    told, heard = PROCESSES.Queue(), [PROCESSES.Queue() for _ in range(grid.ranks)]
    for name, settings in cases.items():
        config = configured(path, model, [*grid.settings, *settings])
        (path / name).mkdir(parents=True)
        prepare(config.delivery, path / name)
    processes = [
        PROCESSES.Process(target=_rank, args=(path, model, grid, rank, cases, told, heard[rank]), daemon=True)
        for rank in range(grid.ranks)
    ]
    for process in processes:
        process.start()
    found = {}
    try:
        for name, settings in cases.items():
            config = configured(path, model, [*grid.settings, *settings])
            found[name] = _deliver(config, path / name, told, heard, processes)
    finally:
        for process in processes:
            process.join(timeout=SECONDS if len(found) == len(cases) else 1)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
    assert codes == [0] * grid.ranks
    return found


def _next(told: Any, processes: list[Any]) -> Any:
    """Return what the first rank says next. All ranks must live meanwhile."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with suppress(queue.Empty):
            return told.get(timeout=0.5)
        assert all(process.exitcode in (None, 0) for process in processes), "a rank died"
    raise AssertionError(f"no version was published within {SECONDS} s")


def _deliver(config: Config, run_dir: Path, told: Any, heard: list[Any], processes: list[Any]) -> Told:
    model = load_model(config.model.path, dtype=config.model.dtype)
    base_digest = adapter = None
    if config.lora is not None:
        if config.lora.base == "nf4":
            round_weights(frozen_linears(model))
        base_digest = digest_as(named_weights(model), config.model.dtype)
        adapter = Adapter(model, config.lora, config.lora.serve)
    live = named_weights(model) if adapter is None else adapter.weights()
    core = EngineCore(
        model,
        config.engine,
        name="engine-0",
        max_length=64,
        adapter=adapter,
        base_digest=base_digest,
        keys=run_dir / KEYS,
    )
    result = Told([], [], {})
    try:
        for _ in range(VERSIONS):
            manifest = decode(Manifest, _next(told, processes))
            result.manifests.append(manifest)
            proof = core.swap(core.stage(manifest))
            assert proof.accepted, f"{run_dir.name}: version {manifest.version}: {proof.reason}"
            result.proofs.append(proof)
            for rank in heard:
                rank.put("acknowledged")
        result.weights = {name: tensor.clone() for name, tensor in live.items()}
    finally:
        core.close()
    return result


def _rank(path: Path, model: Path, grid: Grid, rank: int, cases: dict[str, list[str]], told: Any, heard: Any) -> None:
    torch.set_num_threads(1)
    sys.path.append(str(TORCHAO))
    torch.compiler.set_stance("force_eager")  # torchao compiles its step for each shape, which takes minutes here
    ranks = None
    if grid.parts:
        ranks = join(
            path / "store", rank, grid.ranks, tensor_parallel=grid.tensor_parallel, device="cpu", timeout=SECONDS
        )
    for name, settings in cases.items():
        config = configured(path, model, [*grid.settings, *settings])
        built = build_trainer(config, path / name / "checkpoints", meet=lambda device: ranks)
        publisher = make_publisher(config, built, path / name)
        served = dtype_of(config.delivery.dtype or config.model.dtype)

        def score(tokens: Any, trainer: Any = built.trainer, served: torch.dtype = served) -> Any:
            with rounded(trainer.model, served):
                return trainer.score(tokens)

        for version in range(VERSIONS):
            if version:
                assert not built.trainer.step(random_batch(version, step=version)).skipped
            weights = built.trainer.weights()
            manifest = publisher.publish(version, version - 1, version, weights, score).result(timeout=SECONDS)
            if publisher.announces:
                told.put([bytes(frame) for frame in encode(manifest)])
            assert heard.get(timeout=SECONDS) == "acknowledged"
            publisher.acknowledged(version)
        publisher.close()
        built.trainer.close()
    if ranks is not None:
        ranks.leave()

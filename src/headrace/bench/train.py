"""`headrace bench train`: measures how fast the trainer trains, and compares that with the arithmetic that it needs.

After a few steps of warm-up, whole optimizer steps of the real trainer are timed: packing, passes, gradients, the
optimizer and the refresh of the 16-bit weights. With `--compare`, the same sequences are also measured without packing,
without chunks and without compilation.
"""

from __future__ import annotations

import gc
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from headrace.bench.engine_bytes import settle
from headrace.bench.train_flops import FORMULA, Flops, count_flops, peak_of
from headrace.bench.train_work import TrainBench, check_options, draw_sequences, make_batch, padded
from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.errors import UserError
from headrace.models.loading import load_model
from headrace.models.shapes import SHAPES, build_shape
from headrace.training.building import prepare_model
from headrace.training.devices import choose_device
from headrace.training.layers import compiled_layers
from headrace.training.trainer import Trainer
from headrace.types import Batch

Say = Callable[[str], None]

WARM_STEPS = 2
WHOLE = 1 << 62
"""A size of chunks that is large enough for the logits of any row, so that rows are not divided into chunks."""
VARIANTS: dict[str, dict[str, bool]] = {
    "without packing": {"pack": False},
    "without chunks": {"chunk": False},
    "without compilation": {"compile": False},
}


def bench_train(options: TrainBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    check_options(options)
    if options.model not in SHAPES and not Path(options.model).is_dir():
        raise UserError(f"{options.model} is neither a model directory nor a shape (one of {', '.join(SHAPES)})")
    device = choose_device(options.device)
    found = _head(options, device) | _measured(options, device, say)
    if options.compare:
        found["variants"] = {}
        for name, changes in VARIANTS.items():
            say(f"the same sequences {name}")
            found["variants"][name] = _variant(msgspec.structs.replace(options, **changes), device, say, found)
    return found


def _variant(options: TrainBench, device: str, say: Say, base: dict[str, Any]) -> dict[str, Any]:
    try:
        found = _measured(options, device, say)
    except torch.OutOfMemoryError as error:
        return {"ran": False, "why": str(error).partition("\n")[0]}
    return {"ran": True, **found, "slower": base["tokens_per_second"] / found["tokens_per_second"]}


def _head(options: TrainBench, device: str) -> dict[str, Any]:
    return {
        "bench": "train",
        "model": options.model,
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "arguments": msgspec.to_builtins(options),
    }


def _measured(options: TrainBench, device: str, say: Say) -> dict[str, Any]:
    _free(device)
    say(f"loading {options.model} on {device}")
    started = time.perf_counter()
    trainer, flops, vocabulary = _trainer(options, device)
    load_seconds = time.perf_counter() - started
    lengths = draw_sequences(options)
    widths = lengths if options.pack else padded(lengths, options.micro_batch_tokens)
    batches = [make_batch(lengths, widths, vocabulary, i, options.seed) for i in range(WARM_STEPS + options.steps)]
    say(f"warming up on {len(lengths)} sequences of {int(lengths.sum())} tokens, {int(widths.sum())} with padding")
    started = time.perf_counter()
    trainer.warm_up()
    for batch in batches[:WARM_STEPS]:
        trainer.step(batch)
    settle(device)
    warm_seconds = time.perf_counter() - started
    say(f"{options.steps} steps")
    seconds, report = _timed(trainer, batches[WARM_STEPS:], device)
    best = min(seconds)
    mean = sum(seconds) / len(seconds)
    needed = flops.of(lengths.tolist())
    peak = peak_of(torch.cuda.get_device_name()) if device == "cuda" else None
    layers = compiled_layers(trainer.model)
    return {
        "load_seconds": load_seconds,
        "warm_up_seconds": warm_seconds,
        "compute_dtype": str(trainer.model.dtype).removeprefix("torch."),
        "compiled": layers is not None and layers.on,
        "sequences": len(lengths),
        "tokens": int(lengths.sum()),
        "computed_tokens": report.tokens,
        "micro_batches": report.micro_batches,
        "step_seconds": mean,
        "best_step_seconds": best,
        "tokens_per_second": int(lengths.sum()) / mean,
        "flops_a_step": needed,
        "flops": {"a_token": flops.a_token, "a_pair": flops.a_pair, "a_target": flops.a_target},
        "flop_formula": FORMULA,
        "flops_per_second": needed / mean,
        "peak_flops_per_second": peak,
        "mfu": None if peak is None else needed / mean / peak,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "loss": report.loss,
    }


def _timed(trainer: Trainer, batches: list[Batch], device: str) -> tuple[list[float], Any]:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for batch in batches:
        settle(device)
        started = time.perf_counter()
        report = trainer.step(batch)
        settle(device)
        seconds.append(time.perf_counter() - started)
    return seconds, report


def _trainer(options: TrainBench, device: str) -> tuple[Trainer, Flops, int]:
    model = _load(options, device)
    training = TrainingConfig(
        device="cuda" if device == "cuda" else "cpu",
        compile=options.compile,
        micro_batch_tokens=options.micro_batch_tokens,
        activation_checkpointing=options.checkpointing,
    )
    if options.compute_dtype:
        training = msgspec.structs.replace(training, compute_dtype=options.compute_dtype)
    flops = count_flops(model)
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    trainer = Trainer(
        prepare_model(model, training),
        AlgorithmConfig(),
        training,
        total_steps=WARM_STEPS + options.steps,
        warm_start=WarmStartConfig(),
        chunk_elements=None if options.chunk else WHOLE,
    )
    return trainer, flops, vocabulary


def _load(options: TrainBench, device: str) -> Any:
    if options.model in SHAPES:
        return build_shape(options.model, "float32", device, options.seed)
    weights = "random" if options.random_weights else "load"
    return load_model(options.model, weights=weights, dtype="float32", seed=options.seed, device=device)


def _free(device: str) -> None:
    """Release the memory of the last variant, so that the next one can take it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()

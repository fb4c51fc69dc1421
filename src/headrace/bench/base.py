"""What the benchmarks of a model share: the choice of model and device, and how the figures name both."""

from __future__ import annotations

import gc
import platform
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.bench.options import DeliveryBench, EngineBench, LoopBench, TrainBench
from headrace.bench.timing import median_seconds
from headrace.errors import UserError
from headrace.models.loading import load_model
from headrace.models.shapes import SHAPES, build_shape

Weights = dict[str, torch.Tensor]
ModelBench = EngineBench | DeliveryBench | TrainBench | LoopBench

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}


def begin(name: str, options: ModelBench, flag: str = "") -> tuple[str, dict[str, Any]]:
    """Return the device that `--device` asks for, and the first figures: the machine, and the options as given.

    Raises a one-line `UserError` if there is no such device, or if the model is neither the name of a shape nor a
    directory. `flag` is the option that names the model, if there is one.
    """
    if options.model not in SHAPES and not Path(options.model).is_dir():
        raise UserError(f"{flag}{options.model}: neither a model directory nor a shape (one of {', '.join(SHAPES)})")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here")
    gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    return "cuda" if gpu else "cpu", {
        "bench": name,
        "model": options.model,
        "device": "cuda" if gpu else "cpu",
        "device_name": torch.cuda.get_device_name() if gpu else platform.processor() or "cpu",
        "torch": torch.__version__,
        "arguments": msgspec.to_builtins(options),
    }


def choose_dtype(asked: str, device: str) -> str:
    """Return the dtype that `--dtype` asks for, or else the dtype that the device is best at."""
    return asked or ("bfloat16" if device == "cuda" else "float32")


def load(model: str, dtype: str, device: str, seed: int, *, random_weights: bool = False) -> Any:
    """Return the model of this name. It is the same in every process."""
    if model in SHAPES:
        return build_shape(model, dtype, device, seed)
    return load_model(model, weights="random" if random_weights else "load", dtype=dtype, seed=seed, device=device)


def vocabulary_of(model: Any) -> int:
    """Return the number of tokens that the model knows."""
    return int(model.get_input_embeddings().weight.shape[0])


def free_memory(device: str) -> None:
    """Release the memory of one part of a benchmark, so that the next part can take it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def copy_bandwidth(device: str) -> float:
    """Return the bytes per second of a large copy on this device, reads and writes counted, the best of several."""
    size = _COPY_BYTES[device]
    if device == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 4)
    return 2 * size / copy_seconds(size, device, of=min)


def copy_seconds(nbytes: int, device: str, **how: Any) -> float:
    """Return the median seconds of a copy of this many bytes, in one piece. `how` is passed to `median_seconds`."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return median_seconds(lambda: target.copy_(source), device, **how)

"""What all benchmarks of a model use: they build or load the model, choose the device, and record both in the results.

Random weights are created on the device, in the given dtype: no copy of them is made in host memory. The same model,
dtype, device and seed give the same weights. Rotary frequencies stay in float32, as in a loaded model.
"""

import gc
import platform
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig

from headrace.bench.options import DeliveryBench, EngineBench, LoopBench, TrainBench, median_seconds
from headrace.bench.shapes import SHAPES
from headrace.config.model_dir import check_model_dir
from headrace.errors import ModelError, UserError
from headrace.models.attention import ATTENTION
from headrace.models.loading import load_model, refusing_unusable

Weights = dict[str, torch.Tensor]
ModelBench = EngineBench | DeliveryBench | TrainBench | LoopBench


def build_shape(name: str, dtype: str, device: str, seed: int) -> Any:
    """Build a random model of this shape on the device, in eval mode, with Headrace's attention."""
    if name not in SHAPES:
        raise ModelError(f"there is no shape {name!r}: one of {', '.join(SHAPES)}")
    return _build(SHAPES[name](), f"shape {name}", dtype, device, seed)


def build_random(directory: Path, dtype: str, device: str, seed: int) -> Any:
    """Build a random model from the configuration in this directory, on the device, as `build_shape` does."""
    check_model_dir(directory, "random")
    with refusing_unusable(directory):
        return _build(AutoConfig.from_pretrained(directory), str(directory), dtype, device, seed)


def _build(config: PretrainedConfig, name: str, dtype: str, device: str, seed: int) -> Any:
    devices = [torch.cuda.current_device()] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=ATTENTION)
    for buffer_name, buffer in model.named_buffers():
        # Rounded frequencies would be wrong by whole radians at long positions, and nothing else would show that.
        if buffer_name.endswith("inv_freq") and buffer.dtype != torch.float32:
            raise ModelError(f"{name}: {buffer_name} was made as {buffer.dtype}, not in float32")
    return model.eval()


def begin(name: str, options: ModelBench, flag: str = "") -> tuple[str, dict[str, Any]]:
    """Return the device that `--device` asks for, and the first figures: the machine, and the options as given.

    Raises a one-line `UserError` if there is no such device, or if the model is neither a named shape nor a directory.
    `flag` is put before the model's name in the error, for example `--model-shape `.
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
    if random_weights:
        return build_random(Path(model), dtype, device, seed)
    return load_model(model, dtype=dtype, device=device)


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
    size = min(2 << 30, torch.cuda.mem_get_info()[0] // 4) if device == "cuda" else 256 << 20
    return 2 * size / copy_seconds(size, device, of=min)


def copy_seconds(nbytes: int, device: str, **how: Any) -> float:
    """Return the median seconds of a copy of this many bytes, in one piece. `how` is passed to `median_seconds`."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return median_seconds(lambda: target.copy_(source), device, **how)

"""Devices: where a model is trained and served, in which dtype passes compute, and copies between host and device.

A copy from ordinary memory to a GPU waits until everything enqueued before it is done; a copy from pinned memory does
not. So numbers for a pass go through pinned memory.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from headrace.config.schema import Config, TrainingConfig


def compute_dtype(training: TrainingConfig, device: torch.device) -> str:
    """Return the dtype of the passes: the configured dtype, or else the dtype that the device is best at."""
    return training.compute_dtype or ("bfloat16" if device.type == "cuda" else "float32")


def engine_device(config: Config) -> str:
    """Return the device on which engines take weights, on this host.

    It is the CPU for servers that run already, because nothing is known of their devices.
    """
    if config.engine.urls:
        return "cpu"
    on_gpu = config.engine.device == "cuda" or (config.engine.device == "auto" and torch.cuda.is_available())
    return "cuda" if on_gpu else "cpu"


def input_device(model: torch.nn.Module) -> torch.device:
    """Return the device on which a pass computes. Offloaded weights are elsewhere."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return these numbers on the device, in this dtype (by default their own)."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return host.to(device=device, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True).to(dtype or host.dtype)


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a contiguous copy of each tensor on the host."""
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in tensors.items()}

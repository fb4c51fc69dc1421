"""Where a model is trained, and in which dtype its passes compute."""

from __future__ import annotations

import torch

from headrace.config.schema import TrainingConfig
from headrace.errors import UserError


def choose_device(wanted: str) -> str:
    """The device of `[training] device`."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError('[training] device = "cuda", but torch finds no GPU here')
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def compute_dtype(training: TrainingConfig, device: torch.device) -> str:
    """The dtype of the passes: as configured, or what the device is best at."""
    return training.compute_dtype or ("bfloat16" if device.type == "cuda" else "float32")

"""The devices on which a model is trained and served, and the dtype in which the trainer's passes compute."""

from __future__ import annotations

import torch

from headrace.config.schema import Config, TrainingConfig
from headrace.errors import UserError


def choose_device(wanted: str) -> str:
    """Return the device that `[training] device` asks for."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError('[training] device = "cuda", but torch finds no GPU here')
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def compute_dtype(training: TrainingConfig, device: torch.device) -> str:
    """Return the dtype of the passes: the configured dtype, or else the dtype that the device is best at."""
    return training.compute_dtype or ("bfloat16" if device.type == "cuda" else "float32")


def engine_device(config: Config) -> str:
    """Return the device on which the run's engines are, on this host."""
    on_gpu = config.engine.device == "cuda" or (config.engine.device == "auto" and torch.cuda.is_available())
    return "cuda" if on_gpu else "cpu"

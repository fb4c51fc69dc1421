"""Of a LoRA adapter of SmolLM2-135M nothing else travels inside a GPU either (`examples/smollm2/fetch.py` first)."""

from __future__ import annotations

import pytest
import torch

from smollm2_delivery import (  # noqa: F401
    MODEL,
    test_of_a_lora_run_only_the_adapter_travels_and_is_served_as_trained,
    tokenizer,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not MODEL.is_dir(), reason="needs a GPU and examples/smollm2/model"
)

TRANSPORTS = ("cuda_ipc", "shm", "cuda_ipc")
DEVICE = "cuda"

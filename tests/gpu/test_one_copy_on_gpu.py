"""Deliveries in one copy, once more, with trainer and engine on the GPU."""

from __future__ import annotations

import pytest
import torch
from test_one_copy import *  # noqa: F403

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TRANSPORTS = ("cuda_ipc", "shm", "file", "tcp")
DEVICE = "cuda"

"""Copies of numbers from the host to the device, without waiting for work that the device still has to do.

A copy from ordinary memory would wait until everything enqueued before it is done; a copy from pinned memory does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def upload(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return these numbers on the device, in this dtype (by default their own)."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    if device.type != "cuda":
        return host.to(device=device, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True).to(dtype or host.dtype)

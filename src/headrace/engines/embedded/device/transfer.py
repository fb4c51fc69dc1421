"""Numbers on their way to the device, and from it to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import DeadlineError
from headrace.types import Float32Array

GPU_SECONDS = 120.0
"""A GPU that takes longer than this for a few steps hangs."""
_POLL_SECONDS = 5e-5


class Uploads:
    """Sends numbers to a device from pieces of pinned memory, taken in turn: nothing is allocated, nobody waits."""

    PIECES, PIECE_BYTES = 64, 1 << 18

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        if device.type == "cuda":
            pieces = torch.empty((self.PIECES, self.PIECE_BYTES), dtype=torch.uint8, pin_memory=True)
            self._pieces = list(pieces)
            self._read: list[Any] = [torch.cuda.Event() for _ in pieces]  # type: ignore[no-untyped-call]

    def send(self, values: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        """These numbers on the device, in a tensor of their own or in this one."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type != "cuda":
            return host if into is None else into.copy_(host)
        target = torch.empty(host.shape, dtype=host.dtype, device=self._device) if into is None else into
        self._next = (self._next + 1) % self.PIECES
        size, read = host.nbytes, self._read[self._next]
        if size > self.PIECE_BYTES or not read.query():
            return target.copy_(host.pin_memory(), non_blocking=True)
        piece = self._pieces[self._next][:size].view(host.dtype).view(host.shape)
        piece.copy_(host)
        target.copy_(piece, non_blocking=True)
        read.record()
        return target


class StreamMark:
    """A point of the stream."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def passed(self) -> bool:
        """Whether the device has come here."""
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: StreamMark) -> float:
        """How long the device took from there to here, both passed; 0 where host and device are one."""
        return 0.0 if self._event is None else float(earlier._event.elapsed_time(self._event)) / 1e3


class Arriving:
    """A copy of a tensor as it is at this point of the stream; it is there when `ready`."""

    def __init__(self, source: torch.Tensor) -> None:
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")
        self._host.copy_(source, non_blocking=True)
        self.mark = StreamMark(source.device)

    def ready(self) -> bool:
        """Whether `numpy` would not wait."""
        return self.mark.passed()

    def wait(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait until it is there; False if `unless` holds and it is not."""
        deadline = time.monotonic() + GPU_SECONDS
        while not self.ready():
            if time.monotonic() > deadline:
                raise DeadlineError(f"the GPU has not finished what was asked of it within {GPU_SECONDS:.0f} s")
            # First of all: whoever makes `unless` hold needs the interpreter for what comes of it.
            time.sleep(_POLL_SECONDS)
            if unless():
                return self.ready()
        return True

    def numpy(self) -> npt.NDArray[Any]:
        """The numbers, as soon as they are here."""
        self.wait()
        return np.asarray(self._host.numpy())

    def result(self) -> Float32Array:
        """The same, as float32."""
        return np.asarray(self.numpy(), np.float32)

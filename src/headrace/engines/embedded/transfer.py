"""Asynchronous copies of numbers from the host to the device, and from the device to the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headrace.errors import DeadlineError

GPU_SECONDS = 120.0
"""A GPU that needs longer than this for a few steps hangs."""
_POLL_SECONDS = 5e-5


class Uploads:
    """Sends numbers to a device through pieces of pinned memory that are used in turn.

    The host never waits. It allocates pinned memory only if the numbers do not fit or the next piece is still in use.
    """

    PIECES, PIECE_BYTES = 64, 1 << 18

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._next = 0
        if device.type == "cuda":
            pieces = torch.empty((self.PIECES, self.PIECE_BYTES), dtype=torch.uint8, pin_memory=True)
            self._pieces = list(pieces)
            self._read: list[Any] = [torch.cuda.Event() for _ in pieces]  # type: ignore[no-untyped-call]

    def send(self, values: npt.NDArray[Any], into: torch.Tensor | None = None) -> torch.Tensor:
        """Copy these numbers to the device, into a new tensor or into `into`."""
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
    """A point in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()

    def passed(self) -> bool:
        """Return whether the device has reached this point."""
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: StreamMark) -> float:
        """Return the device's time from `earlier` to this point. Both must have passed. It is 0 without a GPU."""
        return 0.0 if self._event is None else float(earlier._event.elapsed_time(self._event)) / 1e3


class Arriving:
    """A copy of a tensor on its way to the host, as the tensor is at this point of the stream."""

    def __init__(self, source: torch.Tensor) -> None:
        self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")
        self._host.copy_(source, non_blocking=True)
        self.mark = StreamMark(source.device)

    def ready(self) -> bool:
        """Return whether `result` would return without waiting."""
        return self.mark.passed()

    def wait(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the copy is complete. Return False if `unless` becomes true before that.

        Raises `DeadlineError` after `GPU_SECONDS`.
        """
        deadline = time.monotonic() + GPU_SECONDS
        while not self.ready():
            if time.monotonic() > deadline:
                raise DeadlineError(f"the GPU has not finished what was asked of it within {GPU_SECONDS:.0f} s")
            # Sleep before `unless` is asked: the thread that makes it true needs the interpreter to finish its work.
            time.sleep(_POLL_SECONDS)
            if unless():
                return self.ready()
        return True

    def result(self) -> npt.NDArray[Any]:
        """Wait for the numbers and return them."""
        self.wait()
        return np.asarray(self._host.numpy())

"""How the benchmarks measure time: by the clock until the device is done, and as time of a core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

REPEATS = 7


class Timed:
    """Measures the time of the body of a `with`. `seconds` and `cpu_seconds` are set when the body ends."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        """The time of a core, which hardly depends on other work on the machine."""

    def __enter__(self) -> Timed:
        settle(self._device)
        self._cpu, self._started = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        settle(self._device)
        self.seconds = time.perf_counter() - self._started
        self.cpu_seconds = time.process_time() - self._cpu


def settle(device: str) -> None:
    """Wait until the device has done all work that was launched."""
    if device == "cuda":
        # Imported late, because most of what is timed needs no torch.
        import torch

        torch.cuda.synchronize()


def median_seconds(
    work: Callable[[], object],
    device: str = "cpu",
    repeats: int = REPEATS,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> float:
    """Return the median seconds of the work until the device is done. A first call is not counted.

    `of` replaces the median, for example by the least.
    """
    times = []
    for _ in range(repeats + 1):
        with Timed(device) as timed:
            work()
        times.append(timed.seconds)
    return of(times[1:])

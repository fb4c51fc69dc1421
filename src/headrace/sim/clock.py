"""An event loop whose time jumps: when nothing is ready to run, it is at once the time of the next timer.

The order of events is that of a real loop in which nothing takes time but what sleeps, so a run under it is a function
of its inputs. It never waits for a file descriptor: only what lives in this process may run under it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.errors import HeadraceError

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Instead of sleeping until the next timer, moves the clock there."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Nothing outside is waited for."""
        if timeout is None:
            raise HeadraceError("under a virtual clock everybody waits and nothing is due: this would take for ever")
        self.time += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on a clock of its own, which starts at 0."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jump.time


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end under a virtual clock, as `asyncio.run` does under the real one."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

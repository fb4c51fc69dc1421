"""An event loop with a virtual clock: when nothing is ready to run, the clock jumps to the next timer.

Events come in the order of a real loop in which only sleeping takes time, so a run under this loop is a function of its
inputs. The loop never waits for a file descriptor, so everything that runs under it must live in this process.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.errors import HeadraceError

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """A selector that moves the clock to the next timer instead of sleeping."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by `timeout`, and wait for nothing outside the process.

        Raises `HeadraceError` if there is no timer, because this wait would never end.
        """
        if timeout is None:
            raise HeadraceError("under a virtual clock everybody waits and nothing is due: this would take for ever")
        self.time += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which starts at 0."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jump.time


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end under a virtual clock, as `asyncio.run` does under the real one."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

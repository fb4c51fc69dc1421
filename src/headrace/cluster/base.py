"""The interface through which the controller acts on the worker processes of its run."""

from __future__ import annotations


class Processes:
    """The worker processes of a run (`supervision.Fleet`). Deaths and returns of workers arrive as events.

    This base class is for runs whose engines and trainer live in the controller's own process: it does nothing.
    """

    def kill(self, name: str) -> None:
        """End a worker that no longer works. It is then started again, like a worker that died."""

    def rejoined(self, name: str) -> None:
        """Report that a restarted worker does its work again, which completes its return."""

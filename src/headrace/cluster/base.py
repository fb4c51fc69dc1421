"""What the controller may ask of whoever watches over the worker processes of its run."""

from __future__ import annotations

from typing import Protocol


class Processes(Protocol):
    """The worker processes of a run (`supervision.Fleet`). Their deaths and returns come as events."""

    def kill(self, name: str) -> None:
        """End a worker that is of no use; it is then started again like one that died."""
        ...

    def rejoined(self, name: str) -> None:
        """A worker that was started again does its work: its return is over."""
        ...


class NoProcesses:
    """For runs whose engines and trainer live in the controller's own process: there is nothing to end."""

    def kill(self, name: str) -> None:
        """See `Processes.kill`."""

    def rejoined(self, name: str) -> None:
        """See `Processes.rejoined`."""

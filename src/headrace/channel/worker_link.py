"""A worker process's link to its controller: its name, its connection, its phase, and the spans of its work."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headrace.channel.heartbeats import Heartbeat, Ready
from headrace.channel.spoke import Incoming, Spoke
from headrace.observe.spans import SpanRecorder


class WorkerLink:
    """The link that every role of a worker uses. It is made from (name, address, run directory) alone."""

    def __init__(self, name: str, address: str, run_dir: Path) -> None:
        self.name = name
        self.run_dir = run_dir
        self.spans = SpanRecorder()
        self.phase = "starting"
        self.peak_memory: Callable[[], int] = int
        """A function that returns the peak GPU memory of this process in bytes. The heartbeat thread calls it."""
        self._generated = 0
        self._lock = threading.Lock()
        self.spoke = Spoke(address, name, beat=self._beat, on_lost=_end_orphan)

    def ready(self, **facts: int | float | str) -> None:
        """Tell the controller that this role serves from now on."""
        self.phase = "ready"
        self.spoke.send(Ready(facts=facts))

    def count_generated(self, tokens: int) -> None:
        """Add to the number of tokens that the next heartbeat reports. May be called from any thread."""
        with self._lock:
            self._generated += tokens

    def next_message(self, timeout: float = 0.5) -> Incoming | None:
        """Return the controller's next message, or None after `timeout`. The spoke notices a silent controller."""
        try:
            return self.spoke.inbox.get(timeout=timeout)
        except queue.Empty:
            return None

    def _beat(self) -> Heartbeat:
        with self._lock:
            generated, self._generated = self._generated, 0
        return Heartbeat(
            phase=self.phase,
            time=time.monotonic(),
            spans=self.spans.drain(),
            generated_tokens=generated,
            peak_memory_bytes=self.peak_memory(),
        )


def _end_orphan() -> None:
    # The controller is gone without a message, so nothing that this process computes can reach anyone.
    os._exit(3)

"""Python's garbage collector in a process that serves an engine: out of the way of its turns."""

from __future__ import annotations

import gc

NEW_OBJECTS = 100_000
"""That may be alive before the collector looks at them; a turn of the host makes ten for each row, and frees them."""


def keep_collector_away() -> None:
    """What is loaded by now stays, and is not looked through again; what comes is looked at rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)

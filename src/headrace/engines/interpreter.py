"""Python in a process that serves an engine: its collector and its other threads out of the way of decoding."""

from __future__ import annotations

import gc
import sys

NEW_OBJECTS = 100_000
"""That may be alive before the collector looks at them; a turn of the host makes ten for each row, and frees them."""
SWITCH_SECONDS = 5e-4
"""For so long at most a thread that stages weights keeps the interpreter from the one that decodes."""


def give_way_to_decoding() -> None:
    """What is loaded by now is not looked through again, what comes is looked at rarely; threads take short turns."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    sys.setswitchinterval(SWITCH_SECONDS)

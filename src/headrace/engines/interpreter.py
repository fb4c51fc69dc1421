"""Interpreter settings of an engine process, so that garbage collection and other threads do not delay decoding."""

from __future__ import annotations

import gc
import sys

NEW_OBJECTS = 100_000
"""The number of new objects that triggers a garbage collection. One turn of the host makes about ten objects for each
row, and frees them."""
SWITCH_SECONDS = 5e-4
"""The longest time that a thread which stages weights may keep the interpreter from the thread that decodes."""


def give_way_to_decoding() -> None:
    """Make garbage collection rare and thread switches quick.

    Objects that exist now are frozen, so the collector never visits them again. Call this after the model is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)
    sys.setswitchinterval(SWITCH_SECONDS)

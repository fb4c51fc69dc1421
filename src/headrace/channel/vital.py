"""Threads that a process cannot do without: an error in one ends the process, so that its owner sees the death."""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from headrace.errors import one_line

EXIT_LOST = 4
"""Something that the worker depends on is gone. It is nobody's mistake, and a restart may help. The last line of the
worker's log says what is gone."""


def vital_thread(target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
    """Make a thread that its process cannot do without. If `target` raises an error, the whole process ends."""

    def run() -> None:
        try:
            target(*args)
        finally:
            if (error := sys.exc_info()[1]) is not None:
                traceback.print_exc()
                sys.stderr.write(f"the thread {name!r} ended: {type(error).__name__}: {one_line(str(error))}\n")
                sys.stderr.flush()
                os._exit(EXIT_LOST)

    return threading.Thread(target=run, name=name, daemon=True)

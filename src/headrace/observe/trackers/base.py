"""The tracker protocol: it is given every record that `metrics.jsonl` gets, as soon as it is written.

A tracker belongs to the user. It is called by one thread that nothing else uses, so it may wait for a network. If it
raises, it is switched off and the run goes on. The smallest one, named by `[observe] trackers = ["mine.py:Printer"]`:

    class Printer:
        def start(self, run, config):
            print("run", run)

        def log(self, record):
            print(record)

        def close(self):
            print("done")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Tracker(Protocol):
    """Follows one run. What the configuration names is called without arguments and returns a tracker."""

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """The run of this name begins or is resumed; `config` is the whole configuration as dictionaries."""
        ...

    def log(self, record: Mapping[str, Any]) -> None:
        """One record, the same as a line of `metrics.jsonl`: `time`, `kind` ("step", "version", ...) and its fields."""
        ...

    def close(self) -> None:
        """The run ends, well or not; nothing comes after."""
        ...

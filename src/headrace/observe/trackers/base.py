"""The tracker protocol: a tracker gets every record of `metrics.jsonl` as soon as the record is written.

A tracker belongs to the user. One thread that nothing else uses calls it, so it may wait for a network. If a tracker
raises, it is switched off and the run continues. `[observe] trackers = ["mine.py:Printer"]` names the smallest one:

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
    """A tracker follows one run. The configuration names a callable without arguments that returns a tracker."""

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Start or resume the run of this name. `config` is the whole configuration as dictionaries."""
        ...

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record, as in a line of `metrics.jsonl`: `time`, `kind` ("step", "version", ...) and its fields."""
        ...

    def close(self) -> None:
        """End the run, whether it succeeded or failed. No call comes after this one."""
        ...

"""Curves as TensorBoard's event files, written without torch and without TensorFlow."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.observe.trackers.base import CurveTracker, Numbers


class Tracker(CurveTracker):
    """A directory of event files. Each process of a run adds one, and TensorBoard shows them as one run."""

    def __init__(self, *, folder: Path, directory: str | None = None) -> None:
        """The event files go to `directory`/NAME of the run, or else to the run directory."""
        self._folder, self._directory = folder, directory

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Open another event file."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        place = self._folder / "tensorboard" if self._directory is None else Path(self._directory) / run
        self._writer = EventFileWriter(str(place))

    def write(self, step: int, numbers: Numbers, time: float) -> None:
        """Add one event with the numbers of a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._writer.add_event(Event(wall_time=time, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()

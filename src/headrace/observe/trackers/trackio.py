"""Curves in Trackio: in a local SQLite file, or in a Space of the Hugging Face hub."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from headrace.observe.trackers.base import CurveTracker, Numbers


class Tracker(CurveTracker):
    """A run in a Trackio project. After a resume the same run continues."""

    def __init__(
        self,
        *,
        folder: Path,
        project: str = "headrace",
        group: str | None = None,
        space_id: str | None = None,
        directory: str | None = None,
    ) -> None:
        """`directory` holds the SQLite file, instead of Trackio's own place; `space_id` sends the curves to a Space."""
        self._folder, self._directory = folder, directory
        self._chosen = {"project": project, "group": group, "space_id": space_id}

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Start the run, or continue the one whose name is in the run directory."""
        if self._directory is not None:
            os.environ["TRACKIO_DIR"] = str(Path(self._directory).resolve())  # Read when trackio is imported.
        import trackio

        known = self._folder / "trackio.name"
        again = known.is_file()
        if not again:
            # Trackio knows a run by its name, and another run directory may have used this one.
            self._folder.mkdir(parents=True, exist_ok=True)
            known.write_text(f"{run}-{uuid4().hex[:6]}")
        self._run = trackio.init(
            **self._chosen,
            name=known.read_text().strip(),
            config=dict(config),
            resume="allow" if again else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, numbers: Numbers, time: float) -> None:
        """Draw the numbers of a step."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()

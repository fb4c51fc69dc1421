"""Curves in Weights & Biases. `WANDB_MODE`, `WANDB_API_KEY` and the other variables of wandb hold, too."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from headrace.observe.trackers.base import CurveTracker, Numbers

FINISH_SECONDS = 8
"""Less than a tracker has to close, so that wandb itself ends the wait for its server."""


class Tracker(CurveTracker):
    """A run in Weights & Biases. After a resume the same run continues."""

    def __init__(
        self,
        *,
        folder: Path,
        project: str = "headrace",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline", "disabled"] | None = None,
        directory: str | None = None,
    ) -> None:
        self._folder = folder
        self._directory = Path(directory) if directory is not None else folder
        self._chosen = {"project": project, "entity": entity, "group": group, "tags": list(tags), "mode": mode}

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Start the run, or continue the one whose id is in the run directory."""
        import wandb

        self._directory.mkdir(parents=True, exist_ok=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        known = self._folder / "wandb.id"
        if not known.is_file():
            known.write_text(uuid4().hex[:12])
        # The console belongs to the run's display, and its lines are not wandb's to record.
        settings = wandb.Settings(silent=True, console="off", finish_timeout=FINISH_SECONDS)
        self._run = wandb.init(
            **self._chosen,
            name=run,
            id=known.read_text().strip(),
            resume="allow",
            dir=self._directory,
            config=dict(config),
            settings=settings,
        )
        # Steps of a resumed run may come a second time, which wandb's own counter does not allow.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Numbers, time: float) -> None:
        """Draw the numbers of a step, over the metric `step`."""
        self._run.log({**numbers, "step": step, "time": time})

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._run.finish()

"""Curves in MLflow. Without the option `uri`, `MLFLOW_TRACKING_URI` and MLflow's own default say where they go."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.observe.trackers.base import CurveTracker, Numbers

NAME = re.compile(r"[^\w./ -]")
"""The characters that MLflow refuses in the name of a metric or parameter."""
VALUE_LENGTH = 500
PARAMETERS = 100
"""The number of parameters in one request that MLflow takes."""


class Tracker(CurveTracker):
    """A run in an MLflow experiment. After a resume the same run continues."""

    def __init__(self, *, folder: Path, uri: str | None = None, experiment: str = "headrace") -> None:
        self._folder, self._uri, self._experiment = folder, uri, experiment

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Start the run, or continue the one whose id is in the run directory."""
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._uri)
        known = self._folder / "mlflow.id"
        if known.is_file():
            self._id = known.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=run).info.run_id
        self._folder.mkdir(parents=True, exist_ok=True)
        known.write_text(self._id)
        self._log_parameters(dict(_flat(config)))

    def _log_parameters(self, parameters: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        found = [Param(NAME.sub("_", key), str(value)[:VALUE_LENGTH]) for key, value in parameters.items()]
        for start in range(0, len(found), PARAMETERS):
            self._client.log_batch(self._id, params=found[start : start + PARAMETERS])

    def write(self, step: int, numbers: Numbers, time: float) -> None:
        """Send the numbers of a step in one request."""
        from mlflow.entities import Metric

        moment = round(1000 * time)
        metrics = [Metric(NAME.sub("_", name), number, moment, step) for name, number in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)


def _flat(config: Mapping[str, Any], *above: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, *above, key)
        else:
            yield ".".join((*above, key)), value

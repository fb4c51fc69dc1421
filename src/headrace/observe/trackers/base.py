"""The protocol of trackers, the built-in ones by name, and the numbers of a record that they draw.

A built-in tracker is a module `headrace.observe.trackers.NAME` with a class `Tracker`. The keyword arguments of its
constructor are its options in the configuration. It keeps what it needs to continue its run after a resume, such as an
id, in a folder of the run directory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from headrace.errors import ConfigError
from headrace.reference import import_function

NAMES = ("wandb", "tensorboard", "mlflow", "trackio")
"""The built-in trackers. Each needs the package of the same name, which the extra of the same name installs."""

Record = Mapping[str, Any]
Numbers = dict[str, float]


class Tracker(Protocol):
    """A tracker follows one run. The configuration names a callable that returns a tracker."""

    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Start or resume the run of this name. `config` is the whole configuration as dictionaries."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one record, as in a line of `metrics.jsonl`: `time`, `kind` ("step", "version", ...) and its fields."""

    def close(self) -> None:
        """End the run, whether it succeeded or failed. No call comes after this one."""


class CurveTracker(ABC):
    """A tracker that draws the numbers of records over steps."""

    _step = 0

    @abstractmethod
    def start(self, run: str, config: Mapping[str, Any]) -> None:
        """Start or resume the run of this name."""

    @abstractmethod
    def write(self, step: int, numbers: Numbers, time: float) -> None:
        """Draw the numbers of a step. The same step may be written again: by another kind of record, or anew."""

    @abstractmethod
    def close(self) -> None:
        """End the run."""

    def log(self, record: Record) -> None:
        """Draw the numbers of a record. A record that names no step, such as an evaluation, is drawn at the latest."""
        self._step = record.get("step", self._step)
        if numbers := numbers_of(record):
            self.write(self._step, numbers, record["time"])


def numbers_of(record: Record) -> Numbers:
    """Return the numbers of a record by the names of their curves.

    Those of a policy step have the names that `metrics.jsonl` gives them. Others are prefixed: `warm_start/nll`,
    `evaluation/pass_1`, `idle/trainer_idle`. Records of single groups have none: steps hold their means.
    """
    kind = record["kind"]
    if kind == "group":
        return {}
    # The number of a step's version is named `version`, and MLflow's file store keeps no curves below another one.
    prefix = "published/" if kind == "version" else f"{kind}/"
    if kind == "step":
        prefix = "" if record.get("objective") == "policy" else "warm_start/"
    return {
        f"{prefix}{key}": float(value)
        for key, value in record.items()
        if isinstance(value, int | float) and key not in ("time", "step")
    }


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # The module is loaded, or blocked, without a spec.
        return False


def find_tracker(name: str, options: Mapping[str, Any], folder: Path | None = None) -> Callable[[], Tracker]:
    """Return what makes the tracker of this name or reference. Nothing is started, and no package is loaded.

    Raises `ConfigError` for a wrong name, a package that is missing, and options that the tracker does not take.
    """
    if name in NAMES:
        if not _installed(name):
            raise ConfigError(f'{name!r} needs a package that is not installed: pip install "headrace[{name}]"')
        make = import_function(f"headrace.observe.trackers.{name}:Tracker")
        given = {**options, "folder": folder or Path()}
    elif ":" not in name:
        raise ConfigError(f"{name!r} is none of {', '.join(NAMES)}, and not module:attribute or file.py:attribute")
    else:
        make, given = import_function(name), dict(options)
    try:
        taken = signature(make)
    except ValueError:  # Some callables that are not written in Python do not say what they take.
        return lambda: make(**given)
    try:
        taken.bind(**given)
    except TypeError as error:
        known = ", ".join(key for key in taken.parameters if key != "folder") or "none"
        raise ConfigError(f"tracker_options.{name}: {error} (its options: {known})") from error
    return lambda: make(**given)

"""A run's directory: where each of its files is, and who may begin in it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.config import Config, dump_config, load_config
from headrace.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class RunDir:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.journal = path / "journal.db"
        self.segments = path / "segments"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "timeline.json"
        self.checkpoints = path / "checkpoints"
        self.status = path / "status.json"
        self.summary = path / "summary.json"
        self.report = path / "report.html"

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """A new directory with the resolved configuration; one that exists is never touched."""
        run_dir = cls(Path(config.run.directory) / config.run.name)
        if run_dir.path.exists():
            raise UserError(
                f"{run_dir.path} exists: choose another [run] name, remove it, "
                f"or go on with it by `headrace resume {run_dir.path}`"
            )
        try:
            run_dir.path.mkdir(parents=True)
            run_dir.write_config(config)
        except OSError as error:
            raise UserError(f"[run] directory: {run_dir.path} cannot be made: {error.strerror}") from error
        return run_dir

    def write_config(self, config: Config) -> None:
        """The resolved configuration, whole or as it was before."""
        part = self.config.with_suffix(".part")
        part.write_text(dump_config(config))
        part.replace(self.config)

    @contextmanager
    def said_when_full(self) -> Iterator[None]:
        """A disk that takes no more ends a run with one line; what was committed before stays good."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise UserError(
                f"{error.filename or self.path} cannot be written: {error.strerror}; when there is room, go on with "
                f"`headrace resume {self.path}`"
            ) from error

    @classmethod
    def open(cls, path: str | Path) -> tuple[RunDir, Config]:
        """An existing run and its configuration."""
        run_dir = cls(Path(path))
        if not run_dir.path.is_dir():
            raise UserError(f"{path}: no such run directory")
        if not run_dir.config.is_file():
            raise UserError(f"{path}: not a run directory (it has no config.toml)")
        return run_dir, load_config(run_dir.config)

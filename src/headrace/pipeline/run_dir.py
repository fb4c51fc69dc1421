"""A run's directory: where each of its files is, and who may begin in it."""

from __future__ import annotations

from pathlib import Path

from headrace.config import Config, dump_config, load_config
from headrace.errors import UserError


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
        except OSError as error:
            raise UserError(f"[run] directory: {run_dir.path} cannot be made: {error.strerror}") from error
        run_dir.config.write_text(dump_config(config))
        return run_dir

    @classmethod
    def open(cls, path: str | Path) -> tuple[RunDir, Config]:
        """An existing run and its configuration."""
        run_dir = cls(Path(path))
        if not run_dir.path.is_dir():
            raise UserError(f"{path}: no such run directory")
        if not run_dir.config.is_file():
            raise UserError(f"{path}: not a run directory (it has no config.toml)")
        return run_dir, load_config(run_dir.config)

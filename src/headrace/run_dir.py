"""The run directory: where each file of a run is, and which configuration a run starts with.

A new run never touches a directory that exists, and `config.toml` is always replaced as a whole.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import structs

from headrace.config import Config, dump_config, load_config
from headrace.config.file_digests import sync
from headrace.config.stores import is_url
from headrace.errors import DiskError, UserError

DEFAULT_NAME = "run"
"""The name of the first run in a directory that was given no name."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def with_name(config: Config, *, existing: bool = False) -> Config:
    """Return the configuration with a name for its run: the given one, or else the next of `run`, `run-2`, `run-3`, ...

    With `existing`, a run without a name gets the name of the newest existing run of this series, if there is one.
    """
    if config.run.name:
        return config
    newest = max(_numbers(Path(config.run.directory)), default=0)
    number = newest if existing and newest else newest + 1
    name = DEFAULT_NAME if number == 1 else f"{DEFAULT_NAME}-{number}"
    return structs.replace(config, run=structs.replace(config.run, name=name))


def _numbers(directory: Path) -> Iterator[int]:
    """Yield the number of every run in the directory that was given no name. Runs may have been deleted in between."""
    for path in directory.glob(f"{DEFAULT_NAME}*"):
        if path.name == DEFAULT_NAME:
            yield 1
        elif found := re.fullmatch(rf"{DEFAULT_NAME}-([1-9][0-9]{{0,8}})", path.name):
            yield int(found[1])


class RunDir:
    """The paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.next_config = path / "config.next.toml"
        """The configuration that a resume tries to start with."""
        self.journal = path / "journal.db"
        self.metrics = path / "metrics.jsonl"
        self.timeline = path / "timeline.json"
        self.checkpoints = path / "checkpoints"
        self.status = path / "status.json"
        self.control = path / "control.json"
        """The file that names the command socket of a live run."""
        self.summary = path / "summary.json"
        self.report = path / "report.html"

    @classmethod
    def of(cls, config: Config) -> RunDir:
        """Return the directory of a run that has a name. It need not exist."""
        return cls(Path(config.run.directory) / config.run.name)

    @classmethod
    def create(cls, config: Config) -> RunDir:
        """Create a new run directory with the resolved configuration. Raises `UserError` if the directory exists."""
        run_dir = cls.of(config)
        try:
            run_dir.path.mkdir(parents=True)
        except FileExistsError as error:
            raise UserError(
                f"{run_dir.path} exists: choose another [run] name, replace it with `headrace train --overwrite`, "
                f"or go on with it by `headrace resume {run_dir.path}`"
            ) from error
        except OSError as error:
            raise UserError(f"[run] directory: {run_dir.path} cannot be made: {error.strerror}") from error
        try:
            write_whole(run_dir.config, dump_config(config).encode(), durable=True)
            run_dir.link_checkpoints(config)
            sync(run_dir.path.parent)
        except OSError as error:
            shutil.rmtree(run_dir.path, ignore_errors=True)
            raise UserError(f"[run] directory: {run_dir.path} cannot be made: {error.strerror}") from error
        except KeyboardInterrupt:
            shutil.rmtree(run_dir.path, ignore_errors=True)
            raise
        return run_dir

    @contextmanager
    def set_aside(self) -> Iterator[Callable[[], None]]:
        """Set an old run of this name aside, for a run that replaces it. Yield a function that deletes the old run.

        If the function is not called, the old run is put back in its place. Raises `UserError` if the directory is not
        that of a run.
        """
        if not self.path.exists():
            yield lambda: None
            return
        if not self.config.is_file():
            raise UserError(f"--overwrite: {self.path} is not a run directory (it has no config.toml)")
        aside = self.path.with_name(f".{self.path.name}.replaced-{os.getpid()}")
        self.path.rename(aside)

        def remove() -> None:
            linked = aside / "checkpoints"
            if linked.is_symlink():
                # The checkpoints of the new run go to the same folder, and would be taken for its own.
                for checkpoint in linked.resolve().glob("step-*"):
                    shutil.rmtree(checkpoint)
            shutil.rmtree(aside)

        try:
            yield remove
        finally:
            if aside.exists():
                shutil.rmtree(self.path, ignore_errors=True)
                aside.rename(self.path)

    def link_checkpoints(self, config: Config) -> None:
        """Make `checkpoints` lead to the run's folder in `[training] checkpoint_directory`, if that is a path."""
        directory = config.training.checkpoint_directory
        if directory and not is_url(directory) and not self.checkpoints.is_symlink():
            folder = (Path(directory) / config.run.name).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # Another worker of this host has made the same link meanwhile.
                self.checkpoints.symlink_to(folder, target_is_directory=True)

    @contextmanager
    def with_trial_config(self, config: Config) -> Iterator[None]:
        """Let workers that start inside this context read `config` instead of `config.toml`.

        The run keeps it only if `keep_config` is called.
        """
        try:
            write_whole(self.next_config, dump_config(config).encode(), durable=True)
            yield
        finally:
            self.next_config.unlink(missing_ok=True)

    def keep_config(self) -> None:
        """Make the trial configuration, if there is one, that of the run, once every process has started with it."""
        with suppress(FileNotFoundError):
            self.next_config.replace(self.config)
            sync(self.path)

    def config_to_start_with(self) -> Config:
        """Return the configuration that a worker has to start with."""
        return load_saved(self.next_config if self.next_config.is_file() else self.config)

    @contextmanager
    def report_full_disk(self) -> Iterator[None]:
        """Turn the error of a disk that is full, over its quota or read-only into a one-line `DiskError`."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise DiskError(
                f"{error.filename or self.path} cannot be written: {error.strerror}; when there is room, go on with "
                f"`headrace resume {self.path}`"
            ) from error

    @classmethod
    def open(cls, path: str | Path) -> tuple[RunDir, Config]:
        """Open an existing run; return its directory and its configuration. Raises `UserError` if it is not a run."""
        run_dir = cls(Path(path))
        if not run_dir.path.is_dir():
            raise UserError(f"{path}: no such run directory")
        if not run_dir.config.is_file():
            raise UserError(f"{path}: not a run directory (it has no config.toml)")
        return run_dir, load_saved(run_dir.config)


def load_saved(path: Path) -> Config:
    """Read the configuration of a run. Older versions saved relative paths, which follow the working directory."""
    return load_config(path, base=Path.cwd())


def write_whole(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write beside the old file and rename over it, so a process that dies meanwhile leaves the old file intact.

    With `durable`, this also holds for a power failure, and after the call the new file survives one.
    """
    part = path.with_suffix(f"{path.suffix}.part")
    with part.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    part.replace(path)
    if durable:
        sync(path.parent)


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used to `damaged-NAME`, so that nothing is lost. Return its new path."""
    names = (path.with_name(f"damaged-{path.name}{again}") for again in ("", *(f".{n}" for n in range(1, 1000))))
    aside = next(name for name in names if not name.exists())
    return path.rename(aside)

"""Checkpoints behind a URL: hosts that share no disk find them there. A checkpoint is complete or does not count.

Object stores cannot rename a folder. So `SHA256SUMS` says that a checkpoint is complete: it is uploaded last, and
deleted first. A checkpoint that is fetched gets its name on the disk only if its files match their digests. The trainer
is the one writer of the folder at the URL. There, too, a checkpoint that cannot be used is set aside: its `SHA256SUMS`
becomes `SHA256SUMS.damaged` or `SHA256SUMS.ahead`, and nothing reads it any more.

    URL/RUN_NAME/step-00000042/...      the same files as on the disk
    URL/RUN_NAME/base/...               the base model of an adapter, if no other directory holds it

No torch is imported here, because commands on the controller's host fetch checkpoints too.
"""

import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from headrace.config.file_digests import SUMS, find_damage, parse_line, sync
from headrace.config.schema import Config
from headrace.config.stores import connect, has_directories, is_url, store_errors
from headrace.errors import ConfigError, UserError
from headrace.training.checkpoints.base import (
    BASES,
    STATE,
    by_name,
    damage_of,
    decode_state,
    latest,
    rename_aside,
    step_names,
    steps_in,
)

SETTING = "[training] checkpoint_directory"
ASIDE = (f"{SUMS}.damaged", f"{SUMS}.ahead")


class RemoteStore:
    """The checkpoints of one run behind a URL. All methods raise a `UserError` of one line if the store refuses."""

    def __init__(self, directory: str, run: str) -> None:
        self.url = f"{directory.rstrip('/')}/{run}"
        self._root = directory
        self._store, path = connect(self.url, SETTING)
        self._path = path.rstrip("/")

    def check(self, *, new: bool) -> None:
        """Write a file at the URL and delete it. If the run is `new`, refuse a folder that has checkpoints already."""
        if self._root.startswith("memory:"):
            raise ConfigError(f"{SETTING}: {self._root} is the memory of one process, and a run has several")
        probe = f"{self._path.rsplit('/', 1)[0]}/.headrace-{secrets.token_hex(8)}"
        with store_errors(ConfigError, f"{SETTING}: {self._root} cannot be used"):
            self._write_parent(probe)
            self._store.pipe_file(probe, b"")
            self._store.rm_file(probe)
            if new and self._folders():
                raise UserError(f"[run] name: {self.url} has checkpoints already; choose another name, or remove them")

    def names(self) -> list[str]:
        """Return the names of the complete checkpoints, oldest first."""
        with store_errors(UserError, f"{SETTING}: {self.url} cannot be read"):
            return [name for name in self._folders() if self._read(name, SUMS) is not None]

    def keep(self, checkpoint: Path, newest: int) -> None:
        """Copy a checkpoint from the disk, then delete all but the `newest` ones, and what broken copies left.

        A base model beside the checkpoint is copied too. What is there already is not copied again.
        """
        with store_errors(UserError, f"{SETTING}: {checkpoint.name} cannot be copied to {self.url}"):
            bases = (checkpoint.parent / name for name in BASES.values())
            for folder in (*filter(Path.is_dir, bases), checkpoint):
                if self._read(folder.name, SUMS) != (folder / SUMS).read_bytes():
                    self._upload(folder)
            complete = self.names()
            for name in self._folders():
                torn = name not in complete and all(self._read(name, marker) is None for marker in ASIDE)
                if torn or name in complete[:-newest]:
                    self._delete(name)

    def fetch_newest(self, directory: Path, last_step: int | None) -> list[str]:
        """Fetch the newest checkpoint that can be used, unless the directory has one with as many steps.

        Return one line for each that cannot be used. As in `base.set_aside`, these are damaged or have more than
        `last_step` policy steps. Without a journal, `last_step` is None, and the run has no checkpoint.
        """
        said: list[str] = []
        complete, here = self.names(), latest(directory)
        if last_step is None:
            return said
        with store_errors(UserError, f"{SETTING}: {self.url} cannot be read"):
            for base in self._missing_bases(directory):
                if damage := self._download(base, directory):
                    said.append(self._set_aside(base, "damaged", damage))
            for name in reversed(complete):
                state = decode_state(self._read(name, STATE) or b"")
                if state is not None and state.policy_steps > last_step:
                    ahead = f"it is of step {state.policy_steps}, and the journal ends at step {last_step}"
                    said.append(self._set_aside(name, "ahead", ahead))
                elif here is not None and steps_in(name) <= steps_in(here.name):
                    break
                elif damage := self._download(name, directory):
                    said.append(self._set_aside(name, "damaged", damage))
                else:
                    break
        return said

    def fetch(self, name: str, directory: Path) -> None:
        """Fetch a checkpoint, or all if `name` is empty, unless the directory has it. A damaged one is refused."""
        here = by_name(directory)
        if name in here:
            return
        complete = self.names()
        wanted = [known for known in complete if not name or name in (known, f"step-{steps_in(known)}")]
        if name and not wanted:
            listed = ", ".join(complete) or "none"
            raise UserError(f"{self.url} has no complete checkpoint {name}; there are {listed}")
        with store_errors(UserError, f"{SETTING}: {self.url} cannot be read"):
            for known in (*self._missing_bases(directory), *wanted):
                if known not in here and (damage := self._download(known, directory)):
                    raise UserError(f"{self.url}/{known} is damaged: {damage}")

    def _missing_bases(self, directory: Path) -> list[str]:
        missing = (name for name in BASES.values() if not (directory / name).is_dir())
        return [name for name in missing if self._read(name, SUMS) is not None]

    def _set_aside(self, name: str, why: str, what: str) -> str:
        self._store.mv(f"{self._path}/{name}/{SUMS}", f"{self._path}/{name}/{SUMS}.{why}")
        return f"{self.url}/{name}: {what}; it is not used"

    def _download(self, name: str, directory: Path) -> str:
        """Fetch a folder into the directory if it is sound. Return one line about its damage, or an empty line."""
        partial, sums = directory / f".partial-fetched-{name}", self._read(name, SUMS) or b""
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            (partial / SUMS).write_bytes(sums)
            for _, file in map(parse_line, sums.decode(errors="replace").splitlines()):
                (partial / file).parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileNotFoundError):  # A file that is missing is damage.
                    if file:
                        self._store.get_file(f"{self._path}/{name}/{file}", str(partial / file))
            if damage := find_damage(partial) if name in BASES.values() else damage_of(partial):
                return damage
            for path in (*partial.rglob("*"), partial):
                sync(path)
            if (directory / name).exists():
                rename_aside(directory / name, "damaged")
            partial.rename(directory / name)
            sync(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return ""

    def _upload(self, folder: Path) -> None:
        self._delete(folder.name)
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / SUMS)
        for file in (*files, folder / SUMS):
            target = f"{self._path}/{folder.name}/{file.relative_to(folder).as_posix()}"
            self._write_parent(target)
            self._store.put_file(str(file), target)

    def _delete(self, name: str) -> None:
        self._store.invalidate_cache()
        with suppress(FileNotFoundError):
            self._store.rm_file(f"{self._path}/{name}/{SUMS}")
        with suppress(FileNotFoundError):
            self._store.rm(f"{self._path}/{name}", recursive=True)

    def _folders(self) -> list[str]:
        self._store.invalidate_cache()
        try:
            found = self._store.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return step_names(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def _read(self, name: str, file: str) -> bytes | None:
        try:
            return bytes(self._store.cat_file(f"{self._path}/{name}/{file}"))
        except FileNotFoundError:
            return None

    def _write_parent(self, target: str) -> None:
        if has_directories(self.url):
            self._store.makedirs(target.rsplit("/", 1)[0], exist_ok=True)


def store_of(config: Config) -> RemoteStore | None:
    """Return the store of the run's checkpoints, or None if `[training] checkpoint_directory` is not a URL."""
    directory = config.training.checkpoint_directory
    return RemoteStore(directory, config.run.name) if is_url(directory) else None


def check_store(config: Config, *, new: bool = False) -> None:
    """Raise a `UserError` of one line if checkpoints go to a URL where this run cannot write any."""
    if (store := store_of(config)) is not None:
        store.check(new=new)


def fetch_missing(config: Config, directory: Path, name: str = "") -> None:
    """Fetch a checkpoint, or all if `name` is empty, that is at the run's URL, if it has one, and not on this host."""
    if (store := store_of(config)) is not None:
        store.fetch(name, directory)

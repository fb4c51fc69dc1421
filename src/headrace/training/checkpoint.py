"""Checkpoints on disk: a directory is there whole, or it is not there.

A checkpoint is written into a hidden sibling, synced to the disk, and renamed. `trainer/state.json` is written last
and lists every file with its size; a directory that does not match its own list is not taken for a checkpoint.

    step-00000042/
      config.json, *.safetensors, tokenizer.json, ...   a complete model directory; of a run with an adapter instead
      adapter_config.json, adapter_model.safetensors    that, as peft writes it
      trainer/optimizer.safetensors
      trainer/reference.safetensors                     where a loss holds to weights that no model directory has
      trainer/state.json

No torch here: the controller looks for checkpoints too.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.config.model_dir import SHARDS as SHARDS
from headrace.errors import UserError
from headrace.types import NO_VERSION

FORMAT = 1
_NAME = re.compile(r"step-\d{8,}")
_PARTIAL = ".partial-"
_NOT_COPIED = {"config.json", ".git", ".gitattributes", "README.md"}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_LARGEST_COPY = 256 << 20


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where the trainer stood."""

    steps_done: int = 0
    """Optimizer steps of both objectives."""
    policy_steps: int = 0
    """Steps of the policy objective: the schedule counts these."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    """Of these, the last ones, whose gradients were not finite."""
    version: int = NO_VERSION
    """The version that the weights were published as."""
    objective: str = ""
    """Whose optimizer state is kept; empty before the first step."""
    optimizer: str = ""
    """The `[training] optimizer` that it is of; empty where none is kept, or it was not written down."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    state: TrainerState
    files: dict[str, int]


def write_checkpoint(directory: Path, state: TrainerState, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint below `directory`, with `write` filling it; its path, once it is whole and on the disk."""
    partial = begin_checkpoint(directory, state)
    write(partial)
    return finish_checkpoint(partial, state)


def partial_path(directory: Path, state: TrainerState) -> Path:
    """Where a checkpoint is until it is whole."""
    return directory / f"{_PARTIAL}step-{state.steps_done:08d}"


def begin_checkpoint(directory: Path, state: TrainerState) -> Path:
    """A hidden directory to be filled; what crashed writes left is gone."""
    directory.mkdir(parents=True, exist_ok=True)
    clean(directory)
    partial = partial_path(directory, state)
    (partial / "trainer").mkdir(parents=True)
    return partial


def finish_checkpoint(partial: Path, state: TrainerState) -> Path:
    """Make what fills the hidden directory a checkpoint; its path, once it is on the disk."""
    directory = partial.parent
    final = directory / partial.name.removeprefix(_PARTIAL)
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    record = _Record(format=FORMAT, state=state, files=files)
    (partial / "trainer" / "state.json").write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    for path in [*partial.rglob("*"), partial]:
        _sync(path)
    if final.exists():
        # A run that went back to an older checkpoint came here again: what stood here is of the abandoned branch.
        final.rename(directory / f"{_PARTIAL}replaced-{final.name}")
    partial.rename(final)
    _sync(directory)
    clean(directory)
    return final


def read_state(checkpoint: Path) -> TrainerState:
    """The trainer's state in a checkpoint; a `UserError` unless the checkpoint is whole."""
    record = _record(checkpoint)
    if record is None:
        raise UserError(f"{checkpoint} is not a complete checkpoint")
    return record.state


def is_sharded(checkpoint: Path) -> bool:
    """Whether the checkpoint's tensors are the shards of several ranks."""
    return (checkpoint / SHARDS).is_dir()


def latest(directory: Path) -> Path | None:
    """The complete checkpoint with the most steps."""
    return max(_complete(directory), key=_steps, default=None)


def torn(directory: Path) -> list[str]:
    """Names of checkpoints that are not complete: something else than a run has damaged them."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(path.name for path in named if _record(path) is None)


def set_aside(directory: Path, last_step: int) -> list[str]:
    """Delete checkpoints with more policy steps than these; their names. Only the one writer may call this.

    A run that was killed may not have written down its last steps: nobody knows what such a checkpoint was trained on.
    """
    ahead = [path for path in _complete(directory) if read_state(path).policy_steps > last_step]
    for checkpoint in ahead:
        doomed = directory / f"{_PARTIAL}ahead-{checkpoint.name}"
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)
    return [path.name for path in ahead]


def by_name(directory: Path) -> dict[str, Path]:
    """The complete checkpoints by name, oldest first; by their number of steps too (`step-42` for `step-00000042`)."""
    paths = sorted(_complete(directory), key=_steps)
    return {name: path for path in paths for name in (f"step-{_steps(path)}", path.name)}


def by_version(directory: Path) -> dict[int, Path]:
    """The complete checkpoints by the version that their weights were published as; unpublished ones are not there."""
    paths = sorted(_complete(directory), key=_steps)
    found = {record.state.version: path for path in paths if (record := _record(path)) is not None}
    return {version: path for version, path in found.items() if version != NO_VERSION}


def prune(directory: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints and what crashed writes left behind; the checkpoints deleted."""
    clean(directory)
    old = sorted(_complete(directory), key=_steps)[:-keep]
    for checkpoint in old:
        # Renamed first: a crash half-way through the deletion must not leave half a checkpoint under its name.
        doomed = directory / f"{_PARTIAL}pruned-{checkpoint.name}"
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)
    return old


def clean(directory: Path) -> None:
    """Remove what crashed writes left behind. Only the one writer of the directory may call this."""
    for leftover in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover)


def copy_companions(source: Path, target: Path) -> None:
    """Copy what makes a model directory complete beside config and weights: tokenizer, chat template, and so on."""
    for file in sorted(source.iterdir()):
        companion = file.is_file() and file.name not in _NOT_COPIED and file.suffix not in _WEIGHTS
        if companion and not file.name.endswith(".index.json") and file.stat().st_size <= _LARGEST_COPY:
            shutil.copyfile(file, target / file.name)


def _complete(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and _record(path) is not None]


def _steps(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _record(checkpoint: Path) -> _Record | None:
    try:
        record = msgspec.json.decode((checkpoint / "trainer" / "state.json").read_bytes(), type=_Record)
        whole = all((checkpoint / name).stat().st_size == size for name, size in record.files.items())
    except (OSError, msgspec.DecodeError):
        return None
    return record if whole and record.format == FORMAT else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Checkpoints on disk. A checkpoint directory is either complete or not there.

A checkpoint is written into a hidden directory beside its final place, synced to the disk, and renamed.
`trainer/state.json` lists every file with its size, and `SHA256SUMS` has the digest of every file. A directory that
does not match its own list does not count as a checkpoint. The digests are compared before a trainer loads a
checkpoint. No checkpoint that might be of use is deleted: it is set aside under another name.

    step-00000042/
      config.json, *.safetensors, tokenizer.json, ...   a complete model directory, or with [lora] instead
      adapter_config.json, adapter_model.safetensors    the adapter, as peft writes it
      trainer/optimizer.safetensors
      trainer/reference.safetensors                     if the loss needs a reference that no model directory holds
      trainer/critic.safetensors                        if there is a critic: its value head and its moments
      trainer/state.json
      SHA256SUMS
    damaged-step-00000043/                              its files are not as they were written
    ahead-step-00000044/                                the journal does not know its last steps

No torch is imported here, because the controller looks for checkpoints too.
"""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.file_digests import SUMS, find_damage, sync, write_digests
from headrace.config.model_dir import SHARDS, read_header
from headrace.errors import ModelError, UserError
from headrace.types import NO_VERSION

FORMAT = 2
WITHOUT_DIGESTS = 1
"""The format of checkpoints that carry no digests. They are read, too."""
STATE = "trainer/state.json"
_NAME = re.compile(r"step-\d{8,}")
_PARTIAL = ".partial-"
_NOT_COPIED = {"config.json", ".git", ".gitattributes", "README.md", SUMS}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_LARGEST_COPY = 256 << 20
ADAPTER_CONFIG = "adapter_config.json"
BASES = {"full": "base", "nf4": "base-nf4"}
"""The name of the directory, beside the checkpoints, of a base model that no other directory holds; by the format in
which the base model is held."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The counters of a trainer at a checkpoint."""

    steps_done: int = 0
    """The number of optimizer steps of both objectives."""
    policy_steps: int = 0
    """The number of steps of the policy objective. The learning rate schedule counts these steps."""
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    """The number of latest steps in a row that were skipped because their gradients were not finite."""
    version: int = NO_VERSION
    """The version under which the weights were published."""
    objective: str = ""
    """The objective that the optimizer state belongs to. Empty before the first step."""
    entropy_weight: float | None = None
    """The weight of the entropy bonus after the last step, if it follows a target."""
    optimizer: str = ""
    """The `[training] optimizer` that the state belongs to. Empty if no state is kept, or if it was not recorded."""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    state: TrainerState
    files: dict[str, int]


def partial_path(directory: Path, state: TrainerState) -> Path:
    """Return the path of a checkpoint until it is complete."""
    return directory / f"{_PARTIAL}step-{state.steps_done:08d}"


def final_path(partial: Path) -> Path:
    """Return the path that a checkpoint has once it is complete."""
    return partial.parent / partial.name.removeprefix(_PARTIAL)


def begin_checkpoint(partial: Path) -> None:
    """Create the hidden directory of a checkpoint, and remove what crashed writes left."""
    clean(partial.parent)
    (partial / "trainer").mkdir(parents=True)


def finish_checkpoint(partial: Path, state: TrainerState) -> Path:
    """Turn the filled hidden directory into a checkpoint. Return its path once it is on the disk."""
    directory = partial.parent
    final = final_path(partial)
    files = {str(f.relative_to(partial)): f.stat().st_size for f in sorted(partial.rglob("*")) if f.is_file()}
    record = _Record(format=FORMAT, state=state, files=files)
    (partial / STATE).write_bytes(msgspec.json.format(msgspec.json.encode(record)))
    write_digests(partial)
    if final.exists():
        # The run went back to an older checkpoint and reached this step again. The existing directory is from the
        # abandoned branch.
        final.rename(directory / f"{_PARTIAL}replaced-{final.name}")
    partial.rename(final)
    sync(directory)
    sync(directory.parent)
    clean(directory)
    return final


def read_state(checkpoint: Path) -> TrainerState:
    """Return the trainer's state in a checkpoint. Raises a `UserError` if the checkpoint is not complete."""
    record = _record(checkpoint)
    if record is None:
        raise UserError(f"{checkpoint} is not a complete checkpoint")
    return record.state


def decode_state(data: bytes) -> TrainerState | None:
    """Return the trainer's state in the bytes of a checkpoint's `STATE`, or None if they cannot be read."""
    try:
        return msgspec.json.decode(data, type=_Record).state
    except (ValueError, msgspec.DecodeError):
        return None


def is_pickled(checkpoint: Path) -> bool:
    """Return whether the checkpoint is of an older version, which wrote shards of ranks with a pickled index."""
    return (checkpoint / SHARDS).is_dir()


def refuse_pickled(checkpoint: Path) -> None:
    """Raise a `UserError` for a checkpoint with a pickle. Reading a pickle can execute what a stranger wrote in it."""
    if is_pickled(checkpoint):
        run_dir = checkpoint.parent.parent
        raise UserError(f"{checkpoint} has shards with a pickled index: `headrace convert {run_dir}` writes it anew")


def pickled(directory: Path) -> list[Path]:
    """Return the complete checkpoints that `headrace convert` must write anew."""
    return [path for path in _complete(directory) if is_pickled(path)]


def latest(directory: Path) -> Path | None:
    """Return the complete checkpoint with the most steps."""
    return next(reversed(_complete(directory)), None)


def set_aside(directory: Path, last_step: int | None) -> list[str]:
    """Rename the newest checkpoints until the newest one can be used. Return one line for each, and for an old format.

    A checkpoint is renamed if a file is damaged, or if it has more than `last_step` policy steps: a run that was killed
    may not have recorded its last steps, and then nobody knows what the checkpoint was trained on. Only the one writer
    of the directory may call this.
    """
    said = []
    for checkpoint in reversed(_named(directory)):
        if what := damage_of(checkpoint):
            kept = rename_aside(checkpoint, "damaged")
        elif last_step is not None and (step := read_state(checkpoint).policy_steps) > last_step:
            kept, what = (
                rename_aside(checkpoint, "ahead"),
                f"it is of step {step}, and the journal ends at step {last_step}",
            )
        else:
            if not (checkpoint / SUMS).exists():
                said.append(f"{checkpoint.name} is of an older version and has no digests: only sizes were compared")
            break
        said.append(f"{checkpoint.name}: {what}; it is kept as {kept.name} and not used")
    return said


def damage_of(checkpoint: Path) -> str:
    """Return one line about what is wrong with the files of a checkpoint, or an empty line. All files are read."""
    record = _record(checkpoint)
    if record is None:
        return find_damage(checkpoint) or "it is not a complete checkpoint"
    if record.format != WITHOUT_DIGESTS and not (checkpoint / SUMS).exists():
        return f"{SUMS} is missing"
    try:
        # This is all that can be told about a checkpoint without digests.
        for file in checkpoint.rglob("*.safetensors"):
            read_header(file)
    except ModelError as error:
        return str(error)
    return find_damage(checkpoint)


def rename_aside(checkpoint: Path, why: str) -> Path:
    """Give a checkpoint a name under which nothing uses it, and return the new path."""
    kept, again = checkpoint.with_name(f"{why}-{checkpoint.name}"), 1
    while kept.exists():
        again += 1
        kept = checkpoint.with_name(f"{why}-{checkpoint.name}-{again}")
    checkpoint.rename(kept)
    sync(checkpoint.parent)
    return kept


def by_name(directory: Path) -> dict[str, Path]:
    """Return the complete checkpoints, oldest first, by name and by short name (`step-42` for `step-00000042`)."""
    return {name: path for path in _complete(directory) for name in (f"step-{steps_in(path.name)}", path.name)}


def by_version(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints whose weights were published, by version."""
    return {state.version: path for path, state in _complete(directory).items() if state.version != NO_VERSION}


def incomplete(directory: Path) -> dict[str, str]:
    """Return one line about each checkpoint that is not complete, by its name, oldest first."""
    complete = _complete(directory)
    return {path.name: damage_of(path) for path in _named(directory) if path not in complete}


def prune(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, and what crashed writes left."""
    clean(directory)
    for checkpoint in list(_complete(directory))[:-keep]:
        _delete(checkpoint)


def _delete(checkpoint: Path) -> None:
    # Rename before deleting: a crash during the deletion must not leave half a checkpoint under its name.
    doomed = checkpoint.with_name(f"{_PARTIAL}deleted-{checkpoint.name}")
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def clean(directory: Path) -> None:
    """Remove what crashed writes left. Only the one writer of the directory may call this."""
    for leftover in directory.glob(f"{_PARTIAL}*"):
        shutil.rmtree(leftover)


CHAT_TEMPLATE = "chat_template.jinja"
"""The file of a model directory that holds its chat template. It comes before other places of a template."""


def copy_companions(source: Path, target: Path) -> None:
    """Copy what a model directory needs beside config and weights: tokenizer, chat template, and so on."""
    for file in sorted(source.iterdir()):
        companion = file.is_file() and file.name not in _NOT_COPIED and file.suffix not in _WEIGHTS
        if companion and not file.name.endswith(".index.json") and file.stat().st_size <= _LARGEST_COPY:
            shutil.copyfile(file, target / file.name)


def keep_base(model: Any, directory: Path, source: Path, name: str = BASES["full"]) -> Path:
    """Write a base model that was drawn at random or rounded, unless it is there. Return its model directory."""
    final = directory / name
    if not final.is_dir():
        partial = directory / f".partial-{name}-{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        copy_companions(source, partial)
        write_digests(partial)
        try:
            partial.rename(final)
            sync(directory)
        except OSError:
            if not final.is_dir():
                raise
            # Another rank was first and wrote the same model.
            shutil.rmtree(partial)
    return final


def base_of(checkpoint: Path) -> Path:
    """Return the base model that an adapter checkpoint names. One beside the checkpoint is found after a move too."""
    try:
        named = Path(msgspec.json.decode((checkpoint / ADAPTER_CONFIG).read_bytes())["base_model_name_or_path"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise UserError(f"{checkpoint / ADAPTER_CONFIG} does not name a base model") from error
    beside = checkpoint.parent / named.name
    if named.name in BASES.values() and beside.is_dir():
        return beside
    if not named.is_dir():
        raise UserError(f"{checkpoint} is an adapter of {named}, which is not there any more")
    return named


def step_names(found: Iterable[str]) -> list[str]:
    """Return those names that are names of checkpoints, oldest first."""
    return sorted((name for name in found if _NAME.fullmatch(name)), key=steps_in)


def steps_in(name: str) -> int:
    """Return the number of optimizer steps in the name, also in the short name, of a checkpoint."""
    return int(name.removeprefix("step-"))


def _named(directory: Path) -> list[Path]:
    found = directory.iterdir() if directory.is_dir() else ()
    return [directory / name for name in step_names(path.name for path in found)]


def _complete(directory: Path) -> dict[Path, TrainerState]:
    """Return the complete checkpoints with their states, oldest first."""
    return {path: record.state for path in _named(directory) if (record := _record(path)) is not None}


def _record(checkpoint: Path) -> _Record | None:
    try:
        record = msgspec.json.decode((checkpoint / STATE).read_bytes(), type=_Record)
        whole = all((checkpoint / name).stat().st_size == size for name, size in record.files.items())
    except (OSError, ValueError, msgspec.DecodeError):
        return None
    return record if whole and record.format in (WITHOUT_DIGESTS, FORMAT) else None

"""SHA-256 digests of the files of a directory, in `SHA256SUMS`, as the program `sha256sum` writes and checks them.

Checkpoints and exports carry this file. A file whose bytes have changed since then is named before anything reads it.
"""

import hashlib
import os
from pathlib import Path

from headrace.errors import ModelError

SUMS = "SHA256SUMS"


def write_digests(directory: Path) -> None:
    """Write the digests of all files below a directory, and wait until the files and the names are on the disk.

    The files get the permissions that a new file of this user has (the umask). Libraries that write weights give them
    to their owner alone.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / SUMS)
    lines = [f"{_digest(path)}  {path.relative_to(directory).as_posix()}\n" for path in files]
    (directory / SUMS).write_text("".join(lines))
    for path in files:
        path.chmod((directory / SUMS).stat().st_mode)
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def find_damage(directory: Path, *, everything: bool = True) -> str:
    """Return one line about the first file that is not as it was written, or an empty line if all files are.

    Without `everything`, only the files that are there are compared, and no file in a subdirectory: a person may have
    copied a part of a checkpoint. A directory without digests is taken as it is.
    """
    try:
        lines = (directory / SUMS).read_text().splitlines()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError):
        return f"{SUMS} cannot be read"
    if not lines:
        return f"{SUMS} is empty"
    for line in lines:
        wanted, name = parse_line(line)
        if not name:
            return f"{SUMS} is damaged"
        path = directory / name
        if not everything and ("/" in name or not path.exists()):
            continue
        if not path.is_file():
            return f"{name} is missing"
        try:
            if _digest(path) != wanted:
                return f"{name} has other bytes than were written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def parse_line(line: str) -> tuple[str, str]:
    """Return the digest and the name in a line of `SHA256SUMS`. The name is empty if the line is damaged."""
    digest, _, name = line.partition("  ")
    sound = len(digest) == 64 and name and not Path(name).is_absolute() and ".." not in Path(name).parts
    return digest, name if sound else ""


def check_digests(directory: Path, key: str) -> None:
    """Raise a `ModelError` that begins with `key` if a file of this model directory has changed since it was written.

    A directory that carries no digests, such as one from a model hub, is taken as it is.
    """
    if damage := find_damage(directory, everything=False):
        raise ModelError(f"{key}: {directory} is damaged: {damage}")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

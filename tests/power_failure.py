"""A disk whose power fails: which files a directory has afterwards, at any moment of a recorded program.

`power_failure.c`, loaded into the processes of a program, logs what they do to the files below a directory. `Disk`
replays the log up to a moment. It knows what was synced by then: the bytes of a file at its last fsync, and the names
in a directory at the directory's last fsync. A power failure keeps that, and of everything later nothing, something or
all. Files that are written through mmap are not seen: of these a run has only SQLite's `-shm`, which a power failure
makes useless anyway.
"""

from __future__ import annotations

import random
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

HEAD = struct.Struct("<5Q")
SHIM = Path(__file__).with_suffix(".c")
Kept = Literal["nothing", "something", "all"]


@dataclass(frozen=True)
class Event:
    kind: str
    inode: int
    number: int
    a: bytes
    b: bytes


@dataclass(eq=False)
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    later: list[tuple[int, bytes | None]] = field(default_factory=list)
    """What followed the last sync: bytes at an offset, or None for a new size."""

    def change(self, at: int, data: bytes | None) -> None:
        _change(self.data, at, data)
        self.later.append((at, data))

    def sync(self) -> None:
        self.synced, self.later = bytes(self.data), []

    def after(self, kept: Kept, chance: random.Random) -> bytes:
        if kept == "all":
            return bytes(self.data)
        data = bytearray(self.synced)
        for at, new in self.later if kept == "something" else []:
            if new is None or len(new) <= 4096:
                if chance.random() < 0.5:
                    _change(data, at, new)
                continue
            for start in range(0, len(new), 4096):  # a long write may be torn into pages
                if chance.random() < 0.7:
                    _change(data, at + start, new[start : start + 4096])
        return bytes(data)


@dataclass(eq=False)
class Directory:
    names: dict[str, File | Directory] = field(default_factory=dict)
    synced: dict[str, File | Directory] = field(default_factory=dict)
    later: list[list[tuple[str, File | Directory | None]]] = field(default_factory=list)
    """What followed the last sync: for each call, names with what they mean, or None for a name that is gone."""

    def change(self, *changes: tuple[str, File | Directory | None]) -> None:
        _rename(self.names, changes)
        self.later.append(list(changes))

    def sync(self) -> None:
        self.synced, self.later = dict(self.names), []

    def after(self, kept: Kept, chance: random.Random) -> dict[str, File | Directory]:
        if kept == "all":
            return self.names
        names = dict(self.synced)
        for changes in self.later if kept == "something" else []:
            if chance.random() < 0.5:
                _rename(names, changes)
        return names


class Disk:
    """The files below a directory, as far as the log was replayed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Directory()
        self.inodes: dict[int, File | Directory] = {root.stat().st_ino: self.top}

    def apply(self, event: Event) -> None:
        """Replay one call."""
        if event.kind == "N":
            self._name(event)
        elif event.kind == "R":
            (source, old), (target, new) = self._find(event.a), self._find(event.b)
            assert source is target, "a rename between directories"
            source.change((old, None), (new, source.names[old]))
        elif event.kind == "U":
            directory, name = self._find(event.a)
            directory.change((name, None))
        elif event.inode in self.inodes:
            found = self.inodes[event.inode]
            if event.kind == "S":
                found.sync()
            else:
                assert isinstance(found, File)
                found.change(event.number, event.a if event.kind == "W" else None)

    def _name(self, event: Event) -> None:
        directory, name = self._find(event.a)
        known = self.inodes.get(event.inode)
        if known is not None and known is directory.names.get(name):
            return  # an existing file was opened
        for old, found in directory.names.items():
            if found is known:  # a library renamed it without libc, as safetensors does
                directory.change((old, None), (name, found))
                return
        self.inodes[event.inode] = Directory() if event.number else File()
        directory.change((name, self.inodes[event.inode]))

    def _find(self, path: bytes) -> tuple[Directory, str]:
        *parents, name = Path(path.decode()).relative_to(self.root).parts
        found = self.top
        for parent in parents:
            below = found.names[parent]
            assert isinstance(below, Directory)
            found = below
        return found, name

    def write(self, target: Path, kept: Kept, chance: random.Random) -> None:
        """Write the files that a power failure now leaves to a new directory."""
        _write(self.top, target, kept, chance)

    def read(self, name: str) -> bytes:
        """What a program now reads from a file."""
        directory, last = self._find(str(self.root / name).encode())
        found = directory.names.get(last, File())
        assert isinstance(found, File)
        return bytes(found.data)


def build_shim(directory: Path) -> Path:
    """Compile the shim."""
    made = directory / "power_failure.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(made), str(SHIM), "-ldl"], check=True)
    return made


def recording(shim: Path, root: Path, log: Path) -> dict[str, str]:
    """The variables of the environment with which a program is recorded."""
    return {"LD_PRELOAD": str(shim), "POWER_ROOT": str(root), "POWER_LOG": str(log)}


def read_log(path: Path) -> Iterator[Event]:
    data = path.read_bytes()
    at = 0
    while at < len(data):
        kind, inode, number, a, b = HEAD.unpack_from(data, at)
        at += HEAD.size
        yield Event(chr(kind), inode, number, data[at : at + a], data[at + a : at + a + b])
        at += a + b


def moments(events: list[Event], count: int, chance: random.Random) -> list[int]:
    """So many numbers of events, in order: up to half directly before a sync or a rename, the others anywhere."""
    turning = [at for at, event in enumerate(events) if event.kind in "SR"]
    chosen = chance.sample(turning, min(count // 2, len(turning)))
    others = sorted(set(range(len(events))) - set(chosen))
    return sorted(chosen + chance.sample(others, count - len(chosen)))


def missed(root: Path, events: list[Event], directory: Path) -> list[str]:
    """The files of `root` that the events do not explain, by their paths. Empty if the shim has seen everything.

    The events are replayed into `directory`.
    """
    disk = Disk(root)
    for event in events:
        disk.apply(event)
    disk.write(directory, "all", random.Random(0))
    return _unlike(directory, root)


def _unlike(written: Path, real: Path) -> list[str]:
    """The files that differ between two directories, by their paths."""
    names = {
        str(path.relative_to(top))
        for top in (written, real)
        for path in top.rglob("*")
        if path.is_file() and not path.name.endswith("-shm")
    }
    return sorted(n for n in names if not _same(written / n, real / n))


def _same(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and a.read_bytes() == b.read_bytes()


def _change(data: bytearray, at: int, new: bytes | None) -> None:
    size = at if new is None else max(len(data), at + len(new))
    if len(data) < size:
        data.extend(bytes(size - len(data)))
    if new is None:
        del data[at:]
    else:
        data[at : at + len(new)] = new


def _rename(names: dict[str, File | Directory], changes: object) -> None:
    for name, found in changes:  # type: ignore[attr-defined]
        if found is None:
            names.pop(name, None)
        else:
            names[name] = found


def _write(directory: Directory, target: Path, kept: Kept, chance: random.Random) -> None:
    target.mkdir()
    for name, found in directory.after(kept, chance).items():
        if isinstance(found, Directory):
            _write(found, target / name, kept, chance)
        elif not name.endswith("-shm"):
            (target / name).write_bytes(found.after(kept, chance))

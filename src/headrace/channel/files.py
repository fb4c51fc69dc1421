"""Files over the link: the controller reads a folder from a worker on another host, or writes one there.

Every part is a request with an answer, so neither side holds more than one part in memory. A worker gives and takes
files below one directory only. A folder appears under its name when it is complete, and not before.
"""

import asyncio
import os
import shutil
from pathlib import Path

from headrace.channel.codec import Message
from headrace.channel.hub import Hub
from headrace.channel.worker_link import Incoming, WorkerLink

PART_BYTES = 8 << 20
_PARTIAL = ".partial-link-"


class ListFolder(Message):
    """A request for the names and sizes of the files in a folder."""

    folder: str


class FolderList(Message):
    """The files of a folder by their relative paths, with their sizes."""

    files: dict[str, int]


class ReadPart(Message):
    """A request for a part of a file, at most `PART_BYTES`."""

    path: str
    start: int


class FilePart(Message):
    """The bytes that were read."""

    data: bytes


class WritePart(Message):
    """Write a part of a file. The answer is `PartWritten`."""

    path: str
    start: int
    data: bytes


class FinishFolder(Message):
    """All parts of this folder are written: give it its name. The answer is `PartWritten`."""

    folder: str


class PartWritten(Message):
    """The answer to `WritePart` and `FinishFolder`."""


class FilesComplete(Message):
    """An event: the worker has all folders that it starts from."""


async def read_folder(hub: Hub, peer: str, folder: str, into: Path, timeout: float) -> Path:
    """Copy a folder of a worker into a local directory, where nothing of that name is. Return its path there."""
    partial = into / f"{_PARTIAL}{folder}"
    await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
    listed = await hub.request(peer, ListFolder(folder=folder), FolderList, timeout=timeout)
    for name, size in listed.files.items():
        path = _inside(into, f"{partial.name}/{name}")
        for start in _starts(size):
            part = await hub.request(peer, ReadPart(path=f"{folder}/{name}", start=start), FilePart, timeout=timeout)
            await asyncio.to_thread(_write_part, path, start, part.data)
    return await asyncio.to_thread(_finish, partial, into / folder)


async def write_folder(hub: Hub, peer: str, folder: Path, timeout: float) -> None:
    """Copy a local folder to a worker, which keeps it under the same name."""
    for name, size in _files(folder).items():
        for start in _starts(size):
            data = await asyncio.to_thread(_read_part, folder / name, start)
            part = WritePart(path=f"{folder.name}/{name}", start=start, data=data)
            await hub.request(peer, part, PartWritten, timeout=timeout)
    await hub.request(peer, FinishFolder(folder=folder.name), PartWritten, timeout=timeout)


class FileServer:
    """A worker's end: it answers requests about files below one directory."""

    def __init__(self, link: WorkerLink, directory: Path) -> None:
        self._link = link
        self._directory = directory

    def receive(self) -> None:
        """Answer requests until the controller sends `FilesComplete`."""
        while (incoming := self._link.next_message()) is None or not isinstance(incoming.message, FilesComplete):
            if incoming is not None:
                self.answer(incoming)

    def answer(self, incoming: Incoming) -> bool:
        """Answer a request about files. Return False if it is something else."""
        message = incoming.message
        if not isinstance(message, ListFolder | ReadPart | WritePart | FinishFolder):
            return False
        try:
            self._link.reply(incoming, self._answered(message))
        except (OSError, ValueError) as error:
            self._link.fail(incoming, str(error))
        return True

    def _answered(self, message: ListFolder | ReadPart | WritePart | FinishFolder) -> Message:
        match message:
            case ListFolder(folder=folder):
                return FolderList(files=_files(_inside(self._directory, folder)))
            case ReadPart(path=path, start=start):
                return FilePart(data=_read_part(_inside(self._directory, path), start))
            case WritePart(path=path, start=start, data=data):
                _write_part(_inside(self._directory, f"{_PARTIAL}{path}"), start, data)
            case FinishFolder(folder=folder):
                _finish(_inside(self._directory, f"{_PARTIAL}{folder}"), _inside(self._directory, folder))
        return PartWritten()


def _starts(size: int) -> range:
    """Return where the parts of a file begin. An empty file has one part, so that it is made."""
    return range(0, max(1, size), PART_BYTES)


def _files(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _read_part(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PART_BYTES)


def _write_part(path: Path, start: int, data: bytes) -> None:
    """Write a part of a file, and have it on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("r+b" if start else "wb") as file:
        file.seek(start)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _finish(partial: Path, final: Path) -> Path:
    """Give a folder its name. One that another process of this host has left there is older."""
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    directory = os.open(final.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    return final


def _inside(directory: Path, name: str) -> Path:
    """Return the path of a file below a directory. Raises `ValueError` for a name that leads elsewhere."""
    path = (directory / name).resolve()
    if not path.is_relative_to(directory.resolve()) or path == directory.resolve():
        raise ValueError(f"{name!r} is not below the directory of files")
    return path

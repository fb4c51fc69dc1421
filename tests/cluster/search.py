"""Searches everything that hosts show of a run for texts: arguments, environments, files, and the memory of Ray.

Ray keeps its state (actors, specifications of tasks, key-value store) in the memory of its processes, and shows only
some of it to clients. So the memory itself is searched.
"""

from __future__ import annotations

import base64
import contextlib
import html
import itertools
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hosts import Host
from zmq.utils import z85

PAGE = os.sysconf("SC_PAGE_SIZE")
PRESENT = 1 << 63
"""This bit of an entry in `/proc/PID/pagemap` says that the page is in memory."""

Place = tuple[str, str]
"""A kind of place ("arguments", "environment", "unnamed file", "memory", "file"), and which one it is."""


def forms(begin: bytes) -> set[bytes]:
    """Return how a key that begins with these bytes begins in every form in which it may have been written down.

    4 must divide the number of bytes.
    """
    found = {begin, z85.encode(begin), html.escape(z85.encode(begin).decode()).encode()}
    whole = begin[: len(begin) // 3 * 3]
    found |= {base64.b64encode(whole), base64.urlsafe_b64encode(whole)}
    return found | {begin.hex().encode(), begin.hex().upper().encode()}


def search(texts: Mapping[str, Iterable[bytes]], places: Iterable[tuple[Place, bytes]]) -> dict[str, set[Place]]:
    """Return the places in which each of these texts is, in one of its forms."""
    found: dict[str, set[Place]] = {name: set() for name in texts}
    for place, content in places:
        for name, forms in texts.items():
            if any(form in content for form in forms):
                found[name].add(place)
    return found


def on_hosts(hosts: Sequence[Host], is_rays: Callable[[list[str]], bool]) -> Iterator[tuple[Place, bytes]]:
    """Yield what is seen of all processes of these hosts, the memory of Ray's, and all temporary files."""
    for host in hosts:
        for pid, words in host.processes().items():
            process, program = Path(f"/proc/{pid}"), Path(words[0]).name
            name = f"{host.name}: {' '.join([program, *words[1:3]] if program == 'python' else [program])}"
            # A process may end, close a file or give memory back meanwhile.
            with contextlib.suppress(OSError):
                yield ("arguments", name), (process / "cmdline").read_bytes()
                yield ("environment", name), (process / "environ").read_bytes()
                for file in list((process / "fd").iterdir()):
                    with contextlib.suppress(OSError):
                        if str(file.readlink()).endswith("(deleted)"):
                            yield ("unnamed file", name), file.read_bytes()
                for part in memory(process) if is_rays(words) else ():
                    yield ("memory", name), part
        for folder in ("/tmp", "/dev/shm"):
            yield from in_directory(host.path(folder), f"{host.name}: {folder}")


def memory(process: Path) -> Iterator[bytes]:
    """Yield the pages of memory that a process has written to."""
    lines = (process / "maps").read_text().splitlines()
    with (process / "mem").open("rb", buffering=0) as content, (process / "pagemap").open("rb", buffering=0) as table:
        for addresses, rights, *_ in map(str.split, lines):
            if rights == "rw-p":
                first, last = (int(address, 16) // PAGE for address in addresses.split("-"))
                with contextlib.suppress(OSError):
                    entries = array("Q", os.pread(table.fileno(), 8 * (last - first), 8 * first))
                    present = [number for number, entry in enumerate(entries, first) if entry & PRESENT]
                    # Pages that follow each other have the same distance from their places in the list.
                    for _, run in itertools.groupby(enumerate(present), lambda pair: pair[1] - pair[0]):
                        (_, begin), *more = run
                        yield os.pread(content.fileno(), PAGE * (1 + len(more)), PAGE * begin)


def in_directory(directory: Path, name: str) -> Iterator[tuple[Place, bytes]]:
    """Yield all files of a directory."""
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.is_symlink():
                yield ("file", f"{name}/{path.relative_to(directory)}"), path.read_bytes()

"""Memory that sockets send from: where possible, the kernel sends its pages without copying them first.

The memory has no name in the file system and is freed with its last user; a send in progress keeps it alive.
"""

from __future__ import annotations

import mmap
import os
import socket
import weakref
from dataclasses import dataclass

import numpy as np
import torch


class ServedMemory:
    """Memory of `nbytes` bytes as a tensor and, where the system has `memfd_create`, also as a file in memory."""

    def __init__(self, nbytes: int = 0) -> None:
        self.file = -1
        if nbytes and hasattr(os, "memfd_create"):
            self.file = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, nbytes)
            self.bytes = torch.from_numpy(np.frombuffer(mmap.mmap(self.file, nbytes), np.uint8))
        else:
            self.bytes = torch.empty(nbytes, dtype=torch.uint8)

    def part(self, start: int, stop: int) -> MemorySlice:
        """Return a slice of the bytes, to be sent."""
        return MemorySlice(self, start, stop)


@dataclass(frozen=True)
class MemorySlice:
    """A slice of consecutive bytes of a memory, which it keeps alive."""

    memory: ServedMemory
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __bytes__(self) -> bytes:
        return bytes(self.view)

    @property
    def view(self) -> memoryview:
        """The bytes in place, without a copy."""
        view: memoryview = self.memory.bytes.numpy().data[self.start : self.stop]
        return view

    def send(self, connection: socket.socket) -> None:
        """Send the whole slice through a blocking socket."""
        if self.memory.file < 0:
            connection.sendall(self.view)
            return
        sent = self.start
        while sent < self.stop:
            count = os.sendfile(connection.fileno(), self.memory.file, sent, self.stop - sent)
            if not count:
                raise ConnectionResetError("the other end was closed")
            sent += count

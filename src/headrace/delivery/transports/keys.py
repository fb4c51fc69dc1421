"""The keys of a run are in one file of the run directory: only a process that can read this file may fetch the weights.

Only the owner can read the file, and a file that others can read is refused. The file is made when a run starts and
removed when the run ends. This module does not import torch, because the controller makes the file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import zmq

from headrace.errors import DeliveryError

KEYS = "delivery.keys"
"""The name of the file in the run directory."""


class RunKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Two CURVE key pairs, encoded as Z85: the pair of all servers of the run, and the pair of all clients."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def make_keys(path: Path) -> RunKeys:
    """Make new keys and write them to a file of mode 0600, which replaces an older file."""
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    keys = RunKeys(
        server_public=server[0].decode(),
        server_secret=server[1].decode(),
        client_public=client[0].decode(),
        client_secret=client[1].decode(),
    )
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(msgspec.json.encode(keys))
    partial.rename(path)
    return keys


def read_keys(path: Path | None) -> RunKeys:
    """Read the keys of the run; raises `DeliveryError` if the file is missing, damaged, or readable by others."""
    if path is None:
        raise DeliveryError("weights travel between hosts only with the keys of a run, and none were given")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_bytes()
    except OSError as error:
        raise DeliveryError(f"the keys of the run, {path}, cannot be read: {error.strerror}") from error
    if mode & 0o077:
        raise DeliveryError(f"the keys of the run, {path}, can be read by others (mode {mode:04o}, not 0600)")
    try:
        return msgspec.json.decode(text, type=RunKeys)
    except msgspec.DecodeError as error:
        raise DeliveryError(f"the keys of the run, {path}, are damaged: {error}") from error

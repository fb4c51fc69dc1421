"""The messages, locations and keys of the `tcp` transport.

A client requests byte ranges of one version, and a server replies or refuses. A request for bytes names everything that
it depends on, so a server keeps no state for it: a client that dies or asks again changes nothing for other clients.
The keys of a run are in one file of the run directory: only a process that can read this file may fetch the weights,
on the same host too. The file is made when a run starts and removed when the run ends. This module does not import
torch, because the controller makes the file.
"""

import hashlib
import ipaddress
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from headrace.errors import DeliveryError

KEYS = "delivery.keys"
"""The name of the file with the keys in the run directory. Only its owner may read it."""
BUCKET_BYTES = 4 << 20
"""The bytes that one message carries. On loopback 4 and 8 MiB are equally fast, and 1 MiB is a third slower."""
LARGEST_BUCKET = 64 << 20
_LOCATION = re.compile(r"(tcp|curve)://(\[[0-9a-fA-F:.]+\]|[0-9.]+):(\d+)/(\d+)(/tree)?")


class ReadRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for the bytes `start .. stop` of a place, if the place holds this version.

    A request for no bytes only asks whether the place holds the version.
    """

    ticket: int
    """A number that comes back with the reply, so that replies to requests that were given up are recognised."""
    place: int
    version: int
    start: int
    stop: int
    engine: str = ""
    """In a tree: the name of the engine that asks. With no bytes, it asks whom to fetch from."""
    offer: str = ""
    """In a tree: the location where this engine now serves the version to others."""
    lost: str = ""
    """In a tree: the location of an offer that failed or was wrong."""
    key: str = ""
    """On loopback: what `loopback_key` returns for the server's port."""


class ReadReply(msgspec.Struct, frozen=True, array_like=True):
    """The header of a reply. The bytes follow as a separate frame, unless the reply is a refusal."""

    ticket: int
    start: int
    stop: int
    sequence: int
    """The number of the write that made these bytes. Replies with the same number have bytes of the same write."""
    nbytes: int
    """The size of the whole version."""
    refusal: str = ""
    parent: str = ""
    """In a tree: the location to fetch from; empty means this server."""
    wait: bool = False
    """In a tree: whether to ask again later, because engines that fetch now will serve the version."""


@dataclass(frozen=True)
class MemorySlice:
    """Consecutive bytes of some memory, which are sent without copying them first."""

    view: memoryview
    file: int = -1
    """A file descriptor of the same memory, if it has one."""
    start: int = 0
    """Where the slice begins in the file."""
    owner: object = None
    """An object that keeps the memory and the file alive."""

    def __len__(self) -> int:
        return len(self.view)

    def __bytes__(self) -> bytes:
        return bytes(self.view)


class TcpLocation(msgspec.Struct, frozen=True):
    """A place of a server."""

    encrypted: bool
    host: str
    port: int
    place: int
    tree: bool = False
    """Whether to ask the server whom to fetch from, because other engines that have the version serve it too."""

    @property
    def endpoint(self) -> str:
        """The address that a client connects to."""
        return f"tcp://{self.host}:{self.port}"

    def __str__(self) -> str:
        scheme, tree = "curve" if self.encrypted else "tcp", "/tree" if self.tree else ""
        return f"{scheme}://{self.host}:{self.port}/{self.place}{tree}"


def parse_location(text: str) -> TcpLocation:
    """Parse the location in a manifest; a location beyond this host that is not encrypted is refused."""
    match = _LOCATION.fullmatch(text)
    if match is None:
        raise DeliveryError(f"{text!r} is not a location of the tcp transport")
    location = TcpLocation(match[1] == "curve", match[2], int(match[3]), int(match[4]), match[5] is not None)
    if not location.encrypted and not is_loopback(location.host.strip("[]")):
        raise DeliveryError(f"{text} is beyond this host and not encrypted")
    return location


def is_loopback(address: str) -> bool:
    """Return whether traffic to this IP address never leaves the host; raises `DeliveryError` if it is none."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError as error:
        raise DeliveryError(f"{address!r} is not an IP address") from error


class RunKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Two CURVE key pairs, encoded as Z85: the pair of all servers of the run, and the pair of all clients."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def loopback_key(keys: RunKeys, port: int) -> str:
    """Return what a client on this host must know to be served from this port.

    It is worth nothing at another port, so that nobody who takes over a port that became free learns anything.
    """
    return hashlib.blake2b(str(port).encode(), key=keys.client_secret.encode(), digest_size=16).hexdigest()


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

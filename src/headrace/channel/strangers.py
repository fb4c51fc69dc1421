"""What a socket that other hosts reach must bear: strangers who connect, prove no key, and say what they like.

Nobody can be kept from opening a connection. Every connection is an open file of this process, and a process that may
open no more files can write neither a log nor a checkpoint. So the limit of open files is raised far above what a run
needs, and a connection whose other end proves no key is closed soon.
"""

import contextlib
import resource
from typing import Any

import zmq

HANDSHAKE_SECONDS = 5
"""A connection that has not proved its key within this many seconds is closed."""
OPEN_FILES = 1 << 16


def bear_strangers(socket: "zmq.Socket[Any]", limit: int) -> None:
    """Prepare a socket, before it is bound: it closes connections of strangers, and those that send over `limit` bytes.

    A message counts from its first bytes, in which its sender says how long it is.
    """
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000 * HANDSHAKE_SECONDS)
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    raise_open_files(OPEN_FILES)


def raise_open_files(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted`, or as far as the system allows. Return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        higher = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError):  # Some systems allow less than the limit that they name.
            resource.setrlimit(resource.RLIMIT_NOFILE, (higher, hard))
            soft = higher
    return wanted if soft == resource.RLIM_INFINITY else soft

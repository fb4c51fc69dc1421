"""The limit of open files of a process that strangers can reach."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import zmq

from headrace.channel.strangers import OPEN_FILES, bear_strangers, raise_open_files

LOW = 512


@pytest.fixture
def hard() -> Iterator[int]:
    """A process with a low limit, which may be raised to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, hard))
    yield OPEN_FILES if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_limit_is_raised_as_far_as_the_system_allows(hard: int) -> None:
    assert raise_open_files(LOW - 1) == limit() == LOW
    assert raise_open_files(LOW + 1) == limit() == LOW + 1
    assert raise_open_files(hard + 1) == limit() >= hard


def test_a_socket_that_strangers_reach_has_limits(hard: int) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    bear_strangers(socket, 1000)
    assert socket.getsockopt(zmq.MAXMSGSIZE) == 1000
    assert socket.getsockopt(zmq.HANDSHAKE_IVL) == 5000
    assert limit() == min(OPEN_FILES, hard)
    context.destroy(linger=0)

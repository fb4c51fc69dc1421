"""Where collectives listen: on the interface of one address, which they do not choose themselves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct

import pytest

from headrace.delivery.transports.collectives import check_address, interface_of, listen, own_address, use_interface
from headrace.errors import ConfigError

ADDRESS_OF_NAME = 0x8915
"""Linux' `SIOCGIFADDR`."""


def first_addresses() -> dict[str, str]:
    """Interface -> its first address, asked for one by one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # It has none.
                answer = fcntl.ioctl(asking, ADDRESS_OF_NAME, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def test_the_interface_of_an_address_is_found() -> None:
    known = first_addresses()
    assert known["lo"] == "127.0.0.1"
    assert {name: interface_of(address) for name, address in known.items()} == {name: name for name in known}
    assert interface_of("127.0.0.3") == "lo"
    with pytest.raises(ConfigError, match=r"no network interface of this host has the address 203\.0\.113\.1"):
        interface_of("203.0.113.1")


def test_the_address_towards_one_of_our_own_is_of_the_same_interface() -> None:
    for name, address in first_addresses().items():
        assert interface_of(own_address(address, 9)) == name


def test_a_variable_that_is_set_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    use_interface("127.0.0.2")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("ib0", "=lo")


def test_a_store_listens_on_one_address() -> None:
    store = listen("127.0.0.2", 60)
    socket.create_connection(("127.0.0.2", store.port), timeout=60).close()
    for other in ("127.0.0.1", "127.0.0.3"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, store.port), timeout=60)
    with pytest.raises(OSError, match="assign requested address"):
        listen("203.0.113.1", 60)


def test_an_address_beyond_loopback_needs_trust() -> None:
    check_address("127.0.0.2", False, "it")
    check_address("203.0.113.1", True, "it")
    with pytest.raises(ConfigError, match=r"^\[cluster\] trusted_network: it would listen on 203\.0\.113\.1, "):
        check_address("203.0.113.1", False, "it")
    with pytest.raises(ConfigError, match="it needs an IPv4 address, not ::1"):
        check_address("::1", True, "it")

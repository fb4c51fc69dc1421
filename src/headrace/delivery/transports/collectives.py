"""The network side of torch's collectives: a store that listens on one address only, and the interface of an address.

NCCL, gloo and their stores neither encrypt nor authenticate. So they stay on loopback, unless the user says that nobody
else can reach the network between the hosts (`[cluster] trusted_network`). By themselves they would choose an interface
by the name of the host, and a store would listen on every address of it.
"""

import array
import fcntl
import os
import socket
import struct
import sys
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from headrace.delivery.transports.tcp_wire import is_loopback
from headrace.errors import ConfigError, DeliveryError

LOOPBACK = "127.0.0.1"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"
_LIST_ADDRESSES = 0x8912
"""Linux' `SIOCGIFCONF`. Its answer is a list of `ifreq`, each of an interface's name and one of its addresses."""
_IFREQ_BYTES, _NAME_BYTES, _ADDRESS_AT = 40, 16, 20
_MOST_ADDRESSES = 1024


def check_address(address: str, trusted: bool, what: str) -> None:
    """Raise `ConfigError` unless collectives may listen on this address. `what` says which of them would."""
    if ":" in address:
        raise ConfigError(f"{what} needs an IPv4 address, not {address}")
    if not is_loopback(address):
        # Imported here, because a vLLM server, which only receives, does not have all that configurations need.
        from headrace.config.checks import check_trusted

        check_trusted(trusted, f"{what} would listen on {address}")


def listen(address: str, timeout: float) -> TCPStore:
    """Make a store on a free port of this address. Raises `OSError` if this host does not have the address.

    `timeout` is the longest wait for a key, in seconds.
    """
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listening.detach(),
    )


def own_address(host: str, port: int) -> str:
    """Return the address of this host from which it reaches another one. Nothing is sent.

    Raises `DeliveryError` if there is no way to that host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, port))
        except OSError as error:
            raise DeliveryError(f"this host does not reach {host}:{port}: {error.strerror}") from error
        return str(asking.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the name of the network interface that has this address. Raises `ConfigError` if this host has none."""
    if is_loopback(address):
        return _LOOPBACK_INTERFACE
    for interface, found in _addresses():
        if found == address:
            return interface
    raise ConfigError(f"no network interface of this host has the address {address}")


def use_interface(address: str) -> None:
    """Make the collectives of this process use the interface that has this address.

    NCCL reads its variable only once in a process. A variable that is set already stays as it is.
    """
    interface = interface_of(address)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # Without the sign, any name that begins so would do.


def _addresses() -> list[tuple[str, str]]:
    """Return every interface of this host with each of its IPv4 addresses."""
    answer = array.array("B", bytes(_IFREQ_BYTES * _MOST_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("iL", len(answer), answer.buffer_info()[0])
        filled = struct.unpack("iL", fcntl.ioctl(asking, _LIST_ADDRESSES, request))[0]
    entries = [answer[start : start + _IFREQ_BYTES].tobytes() for start in range(0, filled, _IFREQ_BYTES)]
    return [
        # An address may have a label of its own, such as `eth0:1`.
        (
            entry[:_NAME_BYTES].partition(b"\0")[0].decode().partition(":")[0],
            socket.inet_ntoa(entry[_ADDRESS_AT : _ADDRESS_AT + 4]),
        )
        for entry in entries
    ]

"""A stranger, as a process of a host of its own. It reads what to do, all at once, as one line of JSON.

- `knock`: connect as a client of ZeroMQ, with these keys or none, and send a message.
- `say`: send bytes, and read until the other end closes the connection.
- `hold`: open connections, and hold them until there is another line of input.

It prints what each of these has got, as one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

SECONDS = 60.0
LATER_MS = 1000
"""After the refusal, an answer may still come within this many milliseconds."""
REFUSED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def knock(address: str, name: str, keys: Sequence[str], frames: Sequence[str]) -> dict[str, Any]:
    """`keys` are the server's public key and the client's pair. Return whether it was let in, and what it received."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.IDENTITY, name.encode())
    for option, key in zip((zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), keys, strict=False):
        dealer.setsockopt(option, key.encode())
    news = dealer.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    dealer.connect(f"tcp://{address}")
    if frames:
        dealer.send_multipart([bytes.fromhex(frame) for frame in frames])
    if not news.poll(1000 * SECONDS):
        raise TimeoutError(f"{address} neither let a client in nor refused it")
    let_in = recv_monitor_message(news)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
    received = dealer.recv_multipart() if dealer.poll(LATER_MS) else []
    context.destroy(linger=0)
    return {"let_in": let_in, "received": [frame.hex() for frame in received]}


def say(address: str, parts: Sequence[str]) -> str:
    """Send each part when something was received after the one before. Return all that was received."""
    received = b""
    with connected(address) as line, contextlib.suppress(ConnectionError):
        for number, part in enumerate(parts):
            if number:
                received += line.recv(1 << 16)
            line.sendall(bytes.fromhex(part))
        while more := line.recv(1 << 16):
            received += more
    return received.hex()


def hold(address: str, count: int) -> list[str]:
    """Return what the connections have received, each different thing once."""
    with contextlib.ExitStack() as held:
        lines = [held.enter_context(connected(address)) for _ in range(count)]
        # In one piece: several of these run at a time.
        sys.stdout.write(f"{len(lines)}\n")
        sys.stdout.flush()
        sys.stdin.readline()
        received = set()
        for line in lines:
            line.setblocking(False)
            with contextlib.suppress(BlockingIOError, ConnectionError):
                received.add(line.recv(1 << 16).hex())
        return sorted(received)


def connected(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2)
    tasks = json.loads(sys.stdin.readline())
    with ThreadPoolExecutor(len(tasks)) as pool:
        begun = [pool.submit({"knock": knock, "say": say, "hold": hold}[task.pop("do")], **task) for task in tasks]
        print(json.dumps([task.result() for task in begun]), flush=True)

"""What a delivery is compared with: the same bytes copied in memory or through a bare socket, by as many threads.

Measured in the same run, next to what is compared: a machine that is busy is so for both.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from headrace.bench.engine_bytes import settle
from headrace.delivery.digest import digest
from headrace.delivery.plan import copy_all
from headrace.delivery.transports.tcp_wire import BUCKET_BYTES

REPEATS = 7
SOCKET_SECONDS = 60.0


def median_seconds(work: Callable[[], object], device: str = "cpu", repeats: int = REPEATS) -> float:
    """Of the work, warm, until the device is done."""
    times = []
    for _ in range(repeats + 1):
        settle(device)
        started = time.perf_counter()
        work()
        settle(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def copy_seconds(nbytes: int, device: str) -> float:
    """To copy so many bytes once, in one piece."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return median_seconds(lambda: target.copy_(source), device)


def snapshot_seconds(weights: Mapping[str, torch.Tensor], device: str) -> float:
    """To copy these weights tensor by tensor: the least that a trainer can lose to a publish."""
    placed = {name: tensor.to(device) for name, tensor in weights.items()}
    targets = {name: torch.zeros_like(tensor) for name, tensor in placed.items()}
    return median_seconds(lambda: copy_all(targets, placed), device)


def digest_seconds(weights: Mapping[str, torch.Tensor], device: str) -> float:
    """Of these weights where they lie, as a receiver takes it."""
    placed = {name: tensor.to(device) for name, tensor in weights.items()}
    if device == "cpu":
        return median_seconds(lambda: digest(placed.items()))
    # Late: only where there is a GPU is there a need for Triton.
    from headrace.delivery.digest_kernel import DeviceDigest

    prepared = DeviceDigest(placed)
    return median_seconds(lambda: prepared.value(prepared.launch()), device)


def socket_seconds(nbytes: int) -> float:
    """To pass so many bytes through a loopback socket, in buckets like those of the tcp transport."""
    data, target = np.ones(nbytes, np.uint8).data, np.zeros(nbytes, np.uint8).data
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sending = stack.enter_context(socket.create_connection(server.getsockname(), timeout=SOCKET_SECONDS))
        receiving = stack.enter_context(server.accept()[0])
        receiving.settimeout(SOCKET_SECONDS)
        return median_seconds(lambda: _pass(sending, receiving, data, target))


def _pass(sending: socket.socket, receiving: socket.socket, data: memoryview, target: memoryview) -> None:
    thread = threading.Thread(target=_send, args=(sending, data), daemon=True)
    thread.start()
    got = 0
    while got < len(target):
        count = receiving.recv_into(target[got : got + BUCKET_BYTES])
        if not count:
            raise ConnectionError("the loopback socket was closed")
        got += count
    thread.join(SOCKET_SECONDS)


def _send(sending: socket.socket, data: memoryview) -> None:
    for start in range(0, len(data), BUCKET_BYTES):
        sending.sendall(data[start : start + BUCKET_BYTES])

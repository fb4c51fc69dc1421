"""The baselines of a delivery: a plain copy of the same bytes in memory, or their way through a bare socket.

A baseline is measured in the same run, next to the delivery that is compared with it. So other work on the machine
slows both down alike.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
from collections.abc import Callable

import numpy as np
import torch

from headrace.bench.timing import REPEATS, median_seconds
from headrace.delivery.copying import copy_all
from headrace.delivery.digest import digest
from headrace.delivery.transports.tcp_wire import BUCKET_BYTES

Weights = dict[str, torch.Tensor]
SOCKET_SECONDS = 60.0


class PlainSnapshot:
    """A plain copy of weights, tensor by tensor. A trainer cannot lose less time than this to a publish."""

    def __init__(self, weights: Weights, device: str) -> None:
        self._device = device
        self._targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def seconds(self, weights: Weights, repeats: int = 1) -> float:
        """Return the median seconds of a copy of weights of these shapes.

        Only torch's own threads work on the copy. A delivery may use more cores.
        """
        return median_seconds(lambda: copy_all(self._targets, weights, threads=1), self._device, repeats)


def proof_seconds(weights: Weights, device: str) -> dict[str, float]:
    """Return the seconds of a digest of these weights on `device`, of a plain copy of them, and their ratio.

    Digest and copy use the same number of threads. On a CPU a delivery takes its digests with more threads, so
    `all_cores_digest_seconds` is measured too.
    """
    placed = {name: tensor.to(device) for name, tensor in weights.items()}
    plain = PlainSnapshot(placed, device)
    works: dict[str, Callable[[], float]] = {"copy_seconds": lambda: plain.seconds(placed)}
    if device == "cpu":
        alike = torch.get_num_threads()
        works["digest_seconds"] = lambda: median_seconds(lambda: digest(placed.items(), alike), repeats=1)
        works["all_cores_digest_seconds"] = lambda: median_seconds(lambda: digest(placed.items()), repeats=1)
    else:
        # Imported only here, because Triton is needed only with a GPU.
        from headrace.delivery.kernels import DeviceDigest

        prepared = DeviceDigest(placed)
        works["digest_seconds"] = lambda: median_seconds(lambda: prepared.value(prepared.launch()), device, 1)
    # They take turns, so that other work on the machine slows all of them down alike.
    found = [{name: work() for name, work in works.items()} for _ in range(REPEATS)]
    medians = {name: statistics.median(one[name] for one in found) for name in works}
    return {**medians, "digest_over_copy": medians["digest_seconds"] / medians["copy_seconds"]}


def socket_seconds(nbytes: int, repeats: int = REPEATS) -> float:
    """Return the median seconds to pass this many bytes through a loopback socket, in the buckets of the transport."""
    data, target = np.ones(nbytes, np.uint8).data, np.zeros(nbytes, np.uint8).data
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sending = stack.enter_context(socket.create_connection(server.getsockname(), timeout=SOCKET_SECONDS))
        receiving = stack.enter_context(server.accept()[0])
        receiving.settimeout(SOCKET_SECONDS)
        return median_seconds(lambda: _pass(sending, receiving, data, target), repeats=repeats)


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

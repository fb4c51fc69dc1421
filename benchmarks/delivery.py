"""What a delivery costs on this machine, transport by transport: the real publisher and receiver, in two processes.

    python benchmarks/delivery.py --megabytes 538 --versions 5

For each transport, the median over the versions after the first: `lost`, what the trainer waits for the snapshot;
`ready`, until the manifest is announced (digest included); `staged`, fetching and digesting in the engine's process;
and the bytes over `lost + ready + staged`. Beside them a plain copy of the same bytes in memory and through a bare
loopback socket, the best of five each, like `fetch alone`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from headrace.delivery import transports
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver

MATRICES = 128


def make_weights(megabytes: int) -> dict[str, torch.Tensor]:
    """Matrices of this size together, in float32."""
    columns = 1024
    rows = max(1, megabytes * 1_000_000 // (4 * columns * MATRICES))
    return {f"layers.{i}.weight": torch.randn(rows, columns) for i in range(MATRICES)}


def engine(pipe: Connection, megabytes: int) -> None:
    """Stage what comes through the pipe, and say how long it took."""
    torch.set_num_threads(1)
    receiver = Receiver(make_weights(megabytes), "engine-0")
    while (manifest := pipe.recv()) is not None:
        pipe.send(receiver.stage(manifest).seconds)
    receiver.close()


def measure(transport: str, megabytes: int, versions: int, directory: Path) -> dict[str, float]:
    """Seconds of each part, the median over all versions but the first."""
    weights = make_weights(megabytes)
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=engine, args=(theirs, megabytes))
    process.start()
    sender = transports.sender(transport, "benchmark", directory=directory)
    canary = np.zeros(2, np.int32)
    publisher = Publisher(sender, "float32", 1.0, canary)
    rows = []
    for version in range(versions + 1):
        started = time.monotonic()
        future = publisher.publish(version, version - 1, version, weights, lambda ids: np.zeros(1, np.float32))
        lost = time.monotonic() - started
        manifest = future.result(600)
        ready = time.monotonic() - started - lost
        ours.send(manifest)
        rows.append((lost, ready, ours.recv()))
        publisher.acknowledged(version)
    ours.send(None)
    process.join(60)
    publisher.close()
    lost, ready, staged = (statistics.median(column) for column in zip(*rows[1:], strict=True))
    return {"lost": lost, "ready": ready, "staged": staged, "GB/s": nbytes / (lost + ready + staged) / 1e9}


def memory_copy(nbytes: int) -> float:
    """Seconds to copy so many bytes, warm."""
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8)
    target.copy_(source)
    started = time.monotonic()
    target.copy_(source)
    return time.monotonic() - started


def socket_copy(nbytes: int) -> float:
    """Seconds to pass so many bytes through a loopback socket, warm."""
    data, target = np.ones(nbytes, np.uint8).data, np.ones(nbytes, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        thread = threading.Thread(target=client.sendall, args=(data,))
        started = time.monotonic()
        thread.start()
        got = 0
        while got < nbytes:
            got += accepted.recv_into(target[got:])
        seconds = time.monotonic() - started
        thread.join()
        accepted.close()
    return seconds


def fetch_only(megabytes: int) -> float:
    """Seconds in which the tcp transport alone fetches the bytes, without digest, from a thread of this process."""
    from headrace.delivery.plan import plan_weights

    weights = make_weights(megabytes)
    plan = plan_weights(weights, "float32")
    sender, source = transports.sender("tcp", "benchmark"), transports.source("tcp")
    location = sender.write(0, plan, weights)
    times = []
    for _ in range(6):
        started = time.monotonic()
        source.open(location, 0, plan.entries)
        times.append(time.monotonic() - started)
    source.close()
    sender.close()
    return min(times[1:])


def main() -> None:
    """Print one line per transport."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=538)
    parser.add_argument("--versions", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    nbytes = arguments.megabytes * 1_000_000
    memory = min(memory_copy(nbytes) for _ in range(5))
    loopback = min(socket_copy(nbytes) for _ in range(5))
    fetch = fetch_only(arguments.megabytes)
    print(f"memory copy {nbytes / memory / 1e9:.2f} GB/s, bare loopback socket {nbytes / loopback / 1e9:.2f} GB/s")
    print(f"tcp, fetch alone {nbytes / fetch / 1e9:.2f} GB/s: {loopback / fetch:.2f} of the socket")
    with tempfile.TemporaryDirectory() as directory:
        for transport in transports.NAMES:
            found = measure(transport, arguments.megabytes, arguments.versions, Path(directory) / "weights")
            print(transport, *(f"{name} {value:.3f}" for name, value in found.items()), sep="  ")


if __name__ == "__main__":
    main()

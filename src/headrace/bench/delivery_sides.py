"""The child processes of a benchmark that delivers weights: how to talk to one, and the one that publishes.

A child gets messages of the channel's codec over a pair of sockets. It ends when the connection is closed, so it never
outlives the benchmark. The publisher takes the place of a trainer: as in a run, the work of publishing takes no time
from the engine's process.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from functools import partial
from multiprocessing import connection as pipes
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace.bench.base import Weights
from headrace.bench.timing import median_seconds
from headrace.channel.codec import decode, encode
from headrace.delivery.base import Kind, Manifest
from headrace.delivery.copying import copy_all
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.errors import HeadraceError
from headrace.types import Float32Array, Int32Array

T = TypeVar("T", bound=msgspec.Struct)

IDLE_SECONDS = 3600.0
"""How long a child waits for its next message."""
ANSWER_SECONDS = 600.0
CLOSE_SECONDS = 30.0
_END_SECONDS = 5.0
"""How long to wait for a process to end after its connection was closed, to learn its exit code."""
CANARY_TOKENS = 16
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class Ready(msgspec.Struct, kw_only=True):
    """The answer of a child that has done what its first message asked for."""


class Connection:
    """One end of the connection. One thread may receive while another thread sends."""

    def __init__(self, descriptor: int) -> None:
        self._connection = pipes.Connection(descriptor)
        self.close = self._connection.close

    def send(self, message: msgspec.Struct) -> None:
        """Send one message."""
        frames = encode(message)
        self._connection.send_bytes(len(frames).to_bytes(4, "little"))
        for frame in frames:
            self._connection.send_bytes(frame)

    def receive(self, kind: type[T], deadline: float = IDLE_SECONDS) -> T:
        """Return the next message, which must be of this kind.

        Raises `EOFError` once the other end is closed, and `HeadraceError` after `deadline` seconds.
        """
        if not self._connection.poll(deadline):
            raise HeadraceError(f"a process of the benchmark did not answer within {deadline:g} s")
        count = int.from_bytes(self._connection.recv_bytes(), "little")
        return decode(kind, [self._connection.recv_bytes() for _ in range(count)])


class Side:
    """A child process `python -m MODULE DESCRIPTOR`, and our end of the connection to it."""

    def __init__(self, module: str, first: msgspec.Struct, environment: Mapping[str, str] | None = None) -> None:
        """Start the child, and send it its first message. Call `answer` with `Ready` to wait for it.

        The child gets the environment of this process and the variables of `environment`.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env={**os.environ, **(environment or {})}
            )
        self._line = Connection(ours.detach())
        self.tell(first)

    def tell(self, message: msgspec.Struct) -> None:
        """Send a message. Call `answer` later to get its answer."""
        try:
            self._line.send(message)
        except OSError as error:
            raise self._ended() from error

    def answer(self, kind: type[T]) -> T:
        """Return the answer to the oldest message that has none yet. Raises `HeadraceError` if the child has ended."""
        try:
            return self._line.receive(kind, ANSWER_SECONDS)
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def close(self) -> None:
        """Close the connection, and wait for the child to end. Kill it after `CLOSE_SECONDS`. Idempotent."""
        self._line.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> HeadraceError:
        try:
            code: int | None = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        return HeadraceError(f"a process of the benchmark ended early (exit code {code}): it says why above")


class Begin(msgspec.Struct, kw_only=True):
    """The first message to the publisher: what to publish, and how. Version v has the weights of set v modulo 2."""

    files: list[str]
    """The safetensors files of the two sets."""
    dtype: str
    transport: str
    canary: Int32Array
    logprobs: list[Float32Array]
    """The log-probabilities of the canary under each set."""
    device: str = "cpu"
    send: Kind = "full"
    base_digest: int = 0
    """For an adapter: the digest of the weights under it."""
    per_parameter: bool = False
    receivers: int = 1
    directory: str = ""
    """The directory of the `file` transport."""
    threads: int = 0
    """The number of torch's threads; 0 leaves torch its default."""
    compare: bool = False
    """Whether to time a plain copy before each publish, for comparison."""
    within_seconds: float = 0.0
    """Each publish is delayed by a random time of at most this many seconds. Without a delay, a version would be
    published as soon as the engine has answered, always at the same point of the engine's step."""


class Publish(msgspec.Struct, kw_only=True):
    """The request to publish the next version. No engine reads the version before it any more."""

    version: int


class Published(msgspec.Struct, kw_only=True):
    """The answer: the version can be fetched."""

    manifest: Manifest
    began: float
    """When the publish began, by the monotonic clock, which all processes of a host share."""
    lost_seconds: float
    """How long the trainer waited for `publish` to return."""
    ready_seconds: float
    """How long it took until the version could be fetched."""
    copy_seconds: float
    """The time of a plain copy of the same tensors in this process, measured just before; 0 without `compare`."""


class PublisherProcess(Side):
    """The benchmark's handle to the process that publishes. Only one thread at a time may use it."""

    def __init__(self, begin: Begin, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("headrace.bench.delivery_sides", begin, environment)
        self.answer(Ready)

    def publish(self, version: int) -> Published:
        """Publish the next version, and free the place of the version before it. Return once it can be fetched."""
        self.tell(Publish(version=version))
        return self.answer(Published)


def save_sets(directory: Path, sets: tuple[Weights, Weights]) -> list[str]:
    """Write each set to a file that the process can load, and return the paths."""
    files = [directory / f"set-{index}.safetensors" for index in range(len(sets))]
    for file, weights in zip(files, sets, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    return [str(file) for file in files]


def canary_tokens(vocabulary: int) -> Int32Array:
    """Return a fixed sequence of tokens, which is scored at every delivery."""
    return (np.arange(CANARY_TOKENS) * 7919 % vocabulary).astype(np.int32)


def copy_weights_seconds(targets: Weights, weights: Weights, device: str) -> float:
    """Return the seconds of a plain copy, tensor by tensor. A trainer cannot lose less time than this to a publish.

    Only torch's own threads work on the copy. A delivery may use more cores.
    """
    return median_seconds(lambda: copy_all(targets, weights, threads=1), device, repeats=1)


def _known(logprobs: Float32Array, _: Int32Array) -> Float32Array:
    return logprobs


def serve(line: Connection) -> None:
    """Load the sets, and publish versions until the connection is closed."""
    begin = line.receive(Begin)
    if begin.threads:
        torch.set_num_threads(begin.threads)
    sets = [load_file(file, device=begin.device) for file in begin.files]
    targets = {name: torch.zeros_like(tensor) for name, tensor in sets[0].items()} if begin.compare else {}
    settings = SenderSettings(
        run_id=f"bench-{uuid.uuid4().hex[:8]}",
        directory=Path(begin.directory) if begin.directory else None,
        device=begin.device,
        receivers=begin.receivers,
        per_parameter=begin.per_parameter,
    )
    publisher = Publisher(
        sender(begin.transport, settings),
        begin.dtype,
        CANARY_TOLERANCE[begin.dtype],
        begin.canary,
        send=begin.send,
        base_digest=begin.base_digest,
    )
    line.send(Ready())
    last: int | None = None
    try:
        while True:
            version = line.receive(Publish).version
            if last is not None:
                publisher.acknowledged(last)
            last, weights, canary = version, sets[version % 2], partial(_known, begin.logprobs[version % 2])
            copy = copy_weights_seconds(targets, weights, begin.device) if targets else 0.0
            # The delays are the same in every run.
            time.sleep(random.Random(version).uniform(0.0, begin.within_seconds))
            began = time.monotonic()
            future = publisher.publish(version, version - 1, version, weights, canary)
            lost = time.monotonic() - began
            manifest = future.result()
            ready = time.monotonic() - began
            line.send(
                Published(manifest=manifest, began=began, lost_seconds=lost, ready_seconds=ready, copy_seconds=copy)
            )
    except EOFError:
        return
    finally:
        publisher.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

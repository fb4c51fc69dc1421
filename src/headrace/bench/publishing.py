"""The process that takes the place of a trainer in a benchmark: it publishes sets of weights in turn.

As in a run, the work of publishing a version is done in a process of its own, and takes no time from the engine's.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from headrace.bench.plain_copies import PlainSnapshot, Weights
from headrace.bench.side import Connection, Ready, Side
from headrace.delivery.base import Kind, Manifest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.types import Float32Array, Int32Array

CANARY_TOKENS = 16
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class Begin(msgspec.Struct, kw_only=True):
    """The first message: what to publish, and how. Version v has the weights of set `v % len(files)`."""

    files: list[str]
    """The safetensors files of the sets."""
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


class PublishRequest(msgspec.Struct, kw_only=True):
    """The request to publish a version, or to free the place of an acknowledged version."""

    publish: int = -1
    acknowledged: int = -1


class PublishReply(msgspec.Struct, kw_only=True):
    """The answer to a request."""

    manifest: Manifest | None = None
    lost_seconds: float = 0.0
    """How long the trainer waited for `publish` to return."""
    ready_seconds: float = 0.0
    """How long it took until the version could be fetched."""
    copy_seconds: float = 0.0
    """The time of a plain copy of the same tensors in this process, measured just before; 0 without `compare`."""
    began: float = 0.0
    """When the publish began, by the monotonic clock, which all processes of a host share."""


class PublisherProcess(Side):
    """The benchmark's handle to the process that publishes. Only one thread at a time may use it."""

    def __init__(self, begin: Begin, deadline: float, environment: Mapping[str, str] | None = None) -> None:
        super().__init__("headrace.bench.publishing", deadline=deadline, environment=environment)
        self.ask(begin, Ready)

    def publish(self, version: int) -> PublishReply:
        """Publish the next version. Return once it can be fetched."""
        return self.ask(PublishRequest(publish=version), PublishReply)

    def acknowledged(self, version: int) -> None:
        """Tell the publisher that no engine reads this version any more."""
        self.ask(PublishRequest(acknowledged=version), PublishReply)


def save_sets(directory: Path, sets: tuple[Weights, ...]) -> list[str]:
    """Write each set to a file that the process can load, and return the paths."""
    files = [directory / f"set-{index}.safetensors" for index in range(len(sets))]
    for file, weights in zip(files, sets, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    return [str(file) for file in files]


def canary_tokens(vocabulary: int) -> Int32Array:
    """Return a fixed sequence of tokens, which is scored at every delivery."""
    return (np.arange(CANARY_TOKENS) * 7919 % vocabulary).astype(np.int32)


def serve(line: Connection) -> None:
    """Load the sets, and answer requests until the connection is closed."""
    begin = line.receive(Begin)
    if begin.threads:
        torch.set_num_threads(begin.threads)
    sets = [load_file(file, device=begin.device) for file in begin.files]
    way = sender(
        begin.transport,
        SenderSettings(
            run_id=f"bench-{uuid.uuid4().hex[:8]}",
            directory=Path(begin.directory) if begin.directory else None,
            device=begin.device,
            receivers=begin.receivers,
            per_parameter=begin.per_parameter,
        ),
    )
    tolerance = CANARY_TOLERANCE[begin.dtype]
    publisher = Publisher(way, begin.dtype, tolerance, begin.canary, send=begin.send, base_digest=begin.base_digest)
    plain = PlainSnapshot(sets[0], begin.device) if begin.compare else None
    line.send(Ready())
    try:
        while True:
            line.send(_obey(publisher, line.receive(PublishRequest), begin, sets, plain))
    except EOFError:
        return
    finally:
        publisher.close()


def _obey(
    publisher: Publisher, order: PublishRequest, begin: Begin, sets: list[Weights], plain: PlainSnapshot | None
) -> PublishReply:
    if order.acknowledged >= 0:
        publisher.acknowledged(order.acknowledged)
        return PublishReply()
    version, which = order.publish, order.publish % len(sets)
    copy = plain.seconds(sets[which]) if plain else 0.0
    time.sleep(moment(version, begin.within_seconds))
    started = time.monotonic()
    future = publisher.publish(version, version - 1, version, sets[which], lambda _: begin.logprobs[which])
    lost = time.monotonic() - started
    manifest = future.result()
    ready = time.monotonic() - started
    return PublishReply(manifest=manifest, lost_seconds=lost, ready_seconds=ready, copy_seconds=copy, began=started)


def moment(version: int, within_seconds: float) -> float:
    """Return the delay in seconds before this version is published. It is the same in every run."""
    return random.Random(version).uniform(0.0, within_seconds)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

"""A trainer's place in a benchmark: a process of its own that publishes sets of weights in turn.

What a trainer spends on a version is spent there, as in a run, and takes nothing from the engine's process.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file

from headrace.bench.delivery_plain import PlainSnapshot
from headrace.bench.side import Connection, Side
from headrace.delivery.base import Kind, Manifest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.types import Float32Array, Int32Array

Weights = dict[str, torch.Tensor]

_IDLE_SECONDS = 3600.0


class Begin(msgspec.Struct, kw_only=True):
    """The first message: what to publish, and how. Version v is set `v % len(files)`."""

    files: list[str]
    """Of safetensors, one for each set."""
    dtype: str
    transport: str
    tolerance: float
    canary: Int32Array
    logprobs: list[Float32Array]
    """Of the canary under each set."""
    device: str = "cpu"
    send: Kind = "full"
    base_digest: int = 0
    """adapter: of the weights under it."""
    per_parameter: bool = False
    receivers: int = 1
    directory: str = ""
    """Of the `file` transport."""
    threads: int = 0
    """Of torch; 0 leaves it its own."""
    compare: bool = False
    """Make a plain copy before each publish, to compare with."""
    within_seconds: float = 0.0
    """A publish begins at some moment of so many seconds, as a trainer's does: whoever publishes as soon as an engine
    has answered always meets it at the same place of a step."""


class PublishRequest(msgspec.Struct, kw_only=True):
    """Publish a version, or free the place of one."""

    publish: int = -1
    acknowledged: int = -1


class PublishReply(msgspec.Struct, kw_only=True):
    """What came of an order."""

    manifest: Manifest | None = None
    lost_seconds: float = 0.0
    """That the trainer waited."""
    ready_seconds: float = 0.0
    """Until the version could be fetched."""
    snapshot_seconds: float = 0.0
    """Of those lost, for the copy."""
    copy_seconds: float = 0.0
    """Of a plain copy of the same tensors in this process, just before."""
    began: float = 0.0
    """When, by the monotonic clock that the processes of a host share."""


class PublisherProcess:
    """The benchmark's end of it. Used by one thread at a time."""

    def __init__(self, begin: Begin, deadline: float, environment: Mapping[str, str] | None = None) -> None:
        self._deadline = deadline
        self._side = Side("headrace.bench.publishing", environment=environment)
        self._side.ask(begin, PublishReply, deadline)

    def publish(self, version: int) -> PublishReply:
        """Publish the next version; answers once it can be fetched."""
        return self._side.ask(PublishRequest(publish=version), PublishReply, self._deadline)

    def acknowledged(self, version: int) -> None:
        """No engine reads this version any more."""
        self._side.ask(PublishRequest(acknowledged=version), PublishReply, self._deadline)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._side.close()


def save_sets(directory: Path, sets: tuple[Weights, ...]) -> list[str]:
    """Write each set where the process can load it; their paths."""
    files = [directory / f"set-{index}.safetensors" for index in range(len(sets))]
    for file, weights in zip(files, sets, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
    return [str(file) for file in files]


def serve(line: Connection) -> None:
    """Obey until the line closes."""
    begin = line.receive(Begin, _IDLE_SECONDS)
    if begin.threads:
        torch.set_num_threads(begin.threads)
    sets = [load_file(file, device=begin.device) for file in begin.files]
    way = sender(
        begin.transport,
        f"bench-{uuid.uuid4().hex[:8]}",
        directory=Path(begin.directory) if begin.directory else None,
        device=begin.device,
        receivers=begin.receivers,
        per_parameter=begin.per_parameter,
    )
    publisher = Publisher(
        way, begin.dtype, begin.tolerance, begin.canary, send=begin.send, base_digest=begin.base_digest
    )
    plain = PlainSnapshot(sets[0], begin.device) if begin.compare else None
    line.send(PublishReply())
    try:
        while True:
            line.send(_obey(publisher, line.receive(PublishRequest, _IDLE_SECONDS), begin, sets, plain))
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
    return PublishReply(
        manifest=manifest,
        lost_seconds=lost,
        ready_seconds=time.monotonic() - started,
        snapshot_seconds=publisher.last_snapshot_seconds,
        copy_seconds=copy,
        began=started,
    )


def moment(version: int, within_seconds: float) -> float:
    """When a version is published: every run draws the same."""
    return random.Random(version).uniform(0.0, within_seconds)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

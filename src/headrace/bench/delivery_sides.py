"""The child processes of a benchmark that delivers weights: how to talk to one, and the one that publishes.

A child gets messages of the channel's codec over a pair of sockets. It ends when the connection is closed, so it never
outlives the benchmark.
"""

import gc
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import connection as pipes
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from headrace.bench.base import Weights, load, vocabulary_of
from headrace.bench.engine_checks import plain_twin, score_canary
from headrace.bench.options import REPEATS, DeliveryBench, median_seconds
from headrace.channel.codec import decode, encode
from headrace.config.schema import LoraConfig
from headrace.delivery.base import Kind, Manifest, canary_sequence
from headrace.delivery.copying import copy_all
from headrace.delivery.digest import digest
from headrace.delivery.publisher import Publisher
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.errors import HeadraceError
from headrace.models.loading import named_weights
from headrace.models.lora import Adapter
from headrace.types import Float32Array, Int32Array

T = TypeVar("T", bound=msgspec.Struct)

ANSWER_SECONDS = 600.0
CLOSE_SECONDS = 30.0
_END_SECONDS = 5.0
"""How long to wait for a process to end after its connection was closed, to learn its exit code."""
CANARY_TOKENS = 16
WITHIN_SECONDS = 0.02
"""If engines decode, each publish is delayed by a random time of at most this many seconds, which is several steps of a
GPU. Otherwise a version would be published as soon as the engine has answered, always at the same point of a step."""
RANK = 16
_ADAPTER_SPREAD = 0.02
"""The standard deviation of an adapter's random entries."""
_CHANGE = 0.2
"""The standard deviation of the change from the first set to the second, relative to each weight."""


class Ready(msgspec.Struct, kw_only=True):
    """The answer to a child's first message. The publisher gives the size of a set and the figures of its digest."""

    proof: dict[str, float] = {}


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

    def receive(self, kind: type[T], deadline: float | None = None) -> T:
        """Return the next message, which must be of this kind. Raises `EOFError` once the other end is closed.

        Raises `HeadraceError` after `deadline` seconds.
        """
        if not self._connection.poll(deadline):
            raise HeadraceError(f"a process of the benchmark did not answer within {deadline:g} s")
        count = int.from_bytes(self._connection.recv_bytes(), "little")
        return decode(kind, [self._connection.recv_bytes() for _ in range(count)])


Start = Callable[..., "subprocess.Popen[Any]"]
"""A function that starts a process as `subprocess.Popen` does, on this host or on another one."""


class Side:
    """A child process `python -m MODULE DESCRIPTOR`, and our end of the connection to it."""

    def __init__(
        self,
        module: str,
        first: msgspec.Struct,
        environment: Mapping[str, str] = {},
        start: Start = subprocess.Popen,
    ) -> None:
        """Start the child, and send it its first message. Call `answer` with `Ready` to wait for it."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", module, str(theirs.fileno())]
        with theirs:
            self._process = start(command, pass_fds=[theirs.fileno()], env={**os.environ, **environment})
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
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        code = self._process.returncode
        return HeadraceError(f"a process of the benchmark ended early (exit code {code}): it says why above")


class Begin(msgspec.Struct, kw_only=True):
    """The first message to a child: the options, whose device and dtype are chosen, and what is sent."""

    options: DeliveryBench
    kind: Kind = "full"
    name: str = ""
    """The name of an engine. The publisher has no name."""
    directory: str = ""
    """The directory of the `file` transport."""
    bind: str = "127.0.0.1"
    """The address on which the publisher listens, as in `[delivery] bind`."""
    keys: str = ""
    """The file with the keys of a run, on the host of the child; needed if `bind` is beyond loopback."""
    trusted_network: bool = False
    """As in `[cluster] trusted_network`."""
    random_weights: bool = False
    distinct: bool = False
    """Whether the log-probabilities must show which set an engine has. Then all weights of the two sets differ by much
    more than one bit, and no plain copies are timed."""


class Publish(msgspec.Struct, kw_only=True):
    """The request to publish the next version. No engine reads the version before it any more.

    With `again`, no version is published. The newest version is offered once more.
    """

    version: int
    transport: str
    per_parameter: bool = False
    again: bool = False
    """Whether to offer the newest version once more, with all its weights, as after an engine has refused it."""


class Published(msgspec.Struct, kw_only=True):
    """The answer: the version can be fetched."""

    manifest: Manifest
    began: float
    """When the publish began, by the monotonic clock, which all processes of a host share."""
    lost_seconds: float = 0.0
    """How long the trainer waited for `publish` to return; 0 if the version is offered again."""
    ready_seconds: float
    """How long it took until the version could be fetched."""
    copy_seconds: float = 0.0
    """The time of a plain copy of the same tensors in this process, measured just before; 0 with `distinct`."""


class PublisherProcess(Side):
    """The process that publishes, in the place of a trainer. Only one thread at a time may use it."""

    def __init__(self, begin: Begin, environment: Mapping[str, str] = {}, start: Start = subprocess.Popen) -> None:
        super().__init__("headrace.bench.delivery_sides", begin, environment, start)
        self.proof = self.answer(Ready).proof

    def publish(self, order: Publish) -> Published:
        """Publish the next version, and free the place of the version before it. Return once it can be fetched."""
        self.tell(order)
        return self.answer(Published)


def load_served(begin: Begin) -> tuple[Any, Adapter | None, int | None]:
    """Return the model, the adapter that is merged into it, and the digest of the weights under the adapter.

    The last two are None if no adapter is sent.
    """
    options = begin.options
    model = load(options.model, options.dtype, options.device, options.seed, random_weights=begin.random_weights)
    if begin.kind != "adapter":
        return model, None, None
    base = digest(named_weights(model).items())
    return model, Adapter(model, LoraConfig(rank=RANK, alpha=2.0 * RANK), "merged"), base


def flip_words(tensor: torch.Tensor, share: float, draw: torch.Generator) -> torch.Tensor:
    """Return a copy in which the last bit is flipped in this share of words, chosen at random."""
    changed = tensor.clone()
    count = round(share * tensor.numel())
    if count and tensor.is_floating_point():
        words = changed.view(-1).view(torch.int16 if tensor.itemsize == 2 else torch.int32)
        words[torch.randperm(len(words), generator=draw, device=tensor.device)[:count]] ^= 1
    return changed


@torch.inference_mode()
def two_sets(live: Weights, seed: int, share: float | None = None) -> tuple[Weights, Weights]:
    """Return a copy of these weights, and a set in which the last bit of this share of words differs.

    Without a share, all weights differ, and by much more. The sets are the same in every process.
    """
    draw = torch.Generator(next(iter(live.values())).device).manual_seed(seed)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if share is not None or not tensor.is_floating_point():
            return flip_words(tensor, share or 0.0, draw)
        noise = torch.randn(tensor.shape, generator=draw, device=tensor.device)
        return tensor * (1 + _CHANGE * noise).to(tensor.dtype)

    # In the order of the names, because an engine may hold its weights in another order than a new model.
    names = sorted(live)
    return {name: live[name].clone() for name in names}, {name: changed(live[name]) for name in names}


@torch.inference_mode()
def make_sets(begin: Begin) -> tuple[tuple[Weights, Weights], list[Float32Array], Int32Array, int]:
    """Return two sets of what a trainer of this model would send, and the log-probabilities of the canary under each.

    Return with them the canary, and the digest of the weights under an adapter (0 without one).
    """
    options = begin.options
    model, adapter, base = load_served(begin)
    live = adapter.weights() if adapter else named_weights(model)
    if adapter:
        # All tensors of an adapter change in every step.
        for tensor in live.values():
            tensor.normal_(0.0, _ADAPTER_SPREAD, generator=torch.Generator(tensor.device).manual_seed(options.seed))
    # Rounded as they travel, so that engines have what the canary is scored under.
    rounded = {name: tensor.to(getattr(torch, options.dtype)) for name, tensor in live.items()}
    sets = two_sets(rounded, options.seed, None if adapter or begin.distinct else options.changed)
    twin, canary = plain_twin(model), canary_sequence(vocabulary_of(model), CANARY_TOKENS)
    scores = []
    for weights in sets:
        for name, tensor in live.items():
            tensor.copy_(weights[name])
        if adapter:
            adapter.apply()
        scores.append(score_canary(twin, canary))
    return sets, scores, canary, base or 0


def proof_seconds(weights: Weights, device: str) -> dict[str, float]:
    """Return the seconds of a digest of these weights, of a plain copy with as many threads, and their ratio."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    works: dict[str, Callable[[], object]] = {"copy_seconds": lambda: copy_all(targets, weights, threads=1)}
    if device == "cpu":
        alike = torch.get_num_threads()
        works["digest_seconds"] = lambda: digest(weights.items(), alike)
        # A delivery takes its digests like this, on all cores.
        works["all_cores_digest_seconds"] = lambda: digest(weights.items())
    else:
        # Imported only here, because Triton is needed only with a GPU.
        from headrace.delivery.kernels import DeviceDigest

        prepared = DeviceDigest(weights)
        works["digest_seconds"] = lambda: prepared.value(prepared.launch())
    # They take turns, so that other work on the machine slows all of them down alike.
    found = [{name: median_seconds(work, device, 1) for name, work in works.items()} for _ in range(REPEATS)]
    medians = {name: statistics.median(one[name] for one in found) for name in works}
    return {**medians, "digest_over_copy": medians["digest_seconds"] / medians["copy_seconds"]}


def serve(line: Connection) -> None:
    """Make the sets, and publish versions until the connection is closed."""
    begin = line.receive(Begin)
    options, compare = begin.options, not begin.distinct
    if compare:
        torch.set_num_threads(options.threads)
    sets, scores, canary, base_digest = make_sets(begin)
    gc.collect()
    sizes = {"bytes": sum(tensor.nbytes for tensor in sets[0].values()), "tensors": len(sets[0])}
    line.send(Ready(proof=sizes | proof_seconds(sets[0], options.device) if compare else {}))
    targets = {name: torch.zeros_like(tensor) for name, tensor in sets[0].items()} if compare else {}
    publisher: Publisher | None = None
    last = Publish(version=-1, transport="")
    manifest: Manifest | None = None

    def score(_: Int32Array) -> Float32Array:
        return scores[last.version % 2]

    try:
        while True:
            order = line.receive(Publish)
            if order.again and publisher is not None and manifest is not None:
                began = time.monotonic()
                manifest = publisher.resend(manifest).result()
                ready = time.monotonic() - began
                line.send(Published(manifest=manifest, began=began, ready_seconds=ready))
                continue
            if publisher is not None:
                publisher.acknowledged(last.version)
            if publisher is None or (order.transport, order.per_parameter) != (last.transport, last.per_parameter):
                if publisher is not None:
                    publisher.close()
                settings = SenderSettings(
                    run_id=f"bench-{uuid.uuid4().hex[:8]}",
                    directory=Path(begin.directory) if begin.directory else None,
                    bind=begin.bind,
                    keys=Path(begin.keys) if begin.keys else None,
                    device=options.device,
                    receivers=options.engines,
                    trusted_network=begin.trusted_network,
                    per_parameter=order.per_parameter,
                )
                way = sender(order.transport, settings)
                publisher = Publisher(way, options.dtype, None, canary, send=begin.kind, base_digest=base_digest)
            last, version, weights = order, order.version, sets[order.version % 2]
            # Only torch's own threads work on this copy. A delivery may use more cores.
            copy = median_seconds(lambda: copy_all(targets, sets[0], threads=1), options.device, 1) if targets else 0.0
            if options.decode:
                # The delays are the same in every run.
                time.sleep(random.Random(version).uniform(0.0, WITHIN_SECONDS))
            began = time.monotonic()
            future = publisher.publish(version, version - 1, version, weights, score)
            lost = time.monotonic() - began
            manifest = future.result()
            ready = time.monotonic() - began
            line.send(
                Published(manifest=manifest, began=began, lost_seconds=lost, ready_seconds=ready, copy_seconds=copy)
            )
    except EOFError:
        return
    finally:
        if publisher is not None:
            publisher.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

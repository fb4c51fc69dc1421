"""`headrace bench delivery`: measures what the delivery of a new version costs, by transport and by what is sent.

The trainer and each engine are replaced by processes of their own, in which the real publisher and the real receivers
work, as in a run. If an engine does not prove a version, the benchmark fails, so every figure is of proved versions.

Two sets of weights are published in turn. They differ in the last bit of a given share of words, because small
optimizer steps cause such deltas. The two sets of an adapter differ everywhere, as the tensors of an adapter do after
any step.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from headrace.bench.base import begin, choose_dtype, copy_seconds
from headrace.bench.delivery_engine import Taken
from headrace.bench.delivery_sides import RANK, Begin, Publish, Published, PublisherProcess, Ready, Side
from headrace.bench.options import DeliveryBench
from headrace.bench.report import Say
from headrace.bench.timing import median_seconds
from headrace.delivery.base import Kind, Manifest
from headrace.delivery.copying import threads_here
from headrace.delivery.transports import WITHOUT_GPU
from headrace.delivery.transports.tcp_wire import BUCKET_BYTES
from headrace.errors import DeliveryError, UserError

KINDS: tuple[Kind, ...] = ("full", "delta", "adapter")
SOCKET_SECONDS = 60.0
WARM_UP = 2
"""The number of first versions that are not measured, so that both places to which versions are written in turn have
been used before."""
LEGS = ("snapshot", "digest", "travel", "stage", "notice", "install", "under_way", "first_step")
"""The parts of the time from the publish to the first token of the new version, in order. `snapshot`: the trainer
copies its weights. `digest`: the copy is digested, until the version can be fetched. `travel`: the manifest goes to the
engine. `stage`: the engine fetches and digests the weights. `notice`: the staged weights wait until the engine is
between two steps. `install`: the engine launches the copy over its live weights. `under_way`: the steps that were
launched before end. `first_step`: the copy runs, and the first step with the new weights."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: a transport, and what it sends. It is one line of the printed table."""

    transport: str
    send: Kind
    per_parameter: bool = False

    def __str__(self) -> str:
        return f"{self.transport}, {self.send}{', per parameter' if self.per_parameter else ''}"


def rows(options: DeliveryBench, device: str) -> list[Row]:
    """Return the measurements in order. Raises `UserError` if a transport needs a GPU and the device is a CPU."""
    if device == "cpu" and (unable := [name for name in options.transports if name not in WITHOUT_GPU]):
        raise UserError(f"--transport {unable[0]}: needs --device cuda")
    found = []
    for transport in dict.fromkeys(options.transports):
        for send in (kind for kind in KINDS if kind in options.sends):
            found.append(Row(transport=transport, send=send))
            if options.per_parameter and transport == "nccl":
                found.append(Row(transport=transport, send=send, per_parameter=True))
    return found


def socket_seconds(nbytes: int) -> float:
    """Return the seconds to pass this many bytes through a bare loopback socket, in the buckets of the transport."""
    data, target = np.ones(nbytes, np.uint8).data, np.zeros(nbytes, np.uint8).data
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sending = stack.enter_context(socket.create_connection(server.getsockname(), timeout=SOCKET_SECONDS))
        receiving = stack.enter_context(server.accept()[0])
        receiving.settimeout(SOCKET_SECONDS)

        def send() -> None:
            for start in range(0, nbytes, BUCKET_BYTES):
                sending.sendall(data[start : start + BUCKET_BYTES])

        def pass_once() -> None:
            threading.Thread(target=send, daemon=True).start()
            got = 0
            while got < nbytes:
                count = receiving.recv_into(target[got : got + BUCKET_BYTES])
                if not count:
                    raise ConnectionError("the loopback socket was closed")
                got += count

        return median_seconds(pass_once, repeats=1)


class _Delivered(NamedTuple):
    """The measurements of one version."""

    published: Published
    taken: list[Taken]
    copy_seconds: float
    """The time of a plain copy of as many bytes as were sent, measured just after the delivery."""
    socket_seconds: float
    """The time to pass as many bytes through a bare loopback socket; 0 for transports other than tcp."""


def bench_delivery(options: DeliveryBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    device, found = begin("delivery", options, "--model-shape ")
    todo = rows(options, device)
    options = msgspec.structs.replace(options, device=device, dtype=choose_dtype(options.dtype, device))
    torch.set_num_threads(options.threads)
    found |= {name: getattr(options, name) for name in ("dtype", "threads", "engines")}
    found |= {"sharing_threads": threads_here(), "adapter_rank": RANK, "proof": {}, "rows": []}
    for kind in dict.fromkeys(row.send for row in todo):
        found["proof"][kind], measured = _kind(options, kind, [row for row in todo if row.send == kind], say)
        found["rows"] += measured
    return found


def _kind(
    options: DeliveryBench, kind: Kind, todo: list[Row], say: Say
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Measure the rows that send one kind of weights. Return the figures of its digest, and those of each row."""
    measured, version = [], 0
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-"))
        say(f"making two sets of weights ({kind}) of {options.model} in {options.dtype}")
        begun = Begin(options=options, kind=kind, directory=f"{directory}/weights")
        publisher = stack.enter_context(contextlib.closing(PublisherProcess(begun, _environment(0))))
        say(f"starting {options.engines} engine(s)")
        engines = []
        for number in range(options.engines):
            first = msgspec.structs.replace(begun, name=f"engine-{number}")
            engine = Side("headrace.bench.delivery_engine", first, _environment(number + 1))
            engines.append(stack.enter_context(contextlib.closing(engine)))
        for engine in engines:
            engine.answer(Ready)
        for row in todo:
            say(f"{row}: {options.versions} versions to {options.engines} engine(s)")
            delivered = []
            for _ in range(WARM_UP + options.versions):
                version += 1
                order = Publish(version=version, transport=row.transport, per_parameter=row.per_parameter)
                delivered.append(_deliver(publisher, engines, order, options.device))
            measured.append(_figures(row, delivered[WARM_UP:], decodes=bool(options.decode)))
    return publisher.proof, measured


def _deliver(publisher: PublisherProcess, engines: list[Side], order: Publish, device: str) -> _Delivered:
    published = publisher.publish(order)
    for engine in engines:
        engine.tell(published.manifest)
    taken = [engine.answer(Taken) for engine in engines]
    for number, each in enumerate(taken):
        if each.refused:
            raise DeliveryError(f"version {order.version} was not accepted by engine-{number}: {each.refused}")
    # Compared right after each version, so that other work on the machine slows both down alike.
    wire = _wire_bytes(published.manifest)
    bare = socket_seconds(wire) if order.transport == "tcp" else 0.0
    return _Delivered(published, taken, copy_seconds(wire, device, repeats=1), bare)


def _figures(row: Row, delivered: list[_Delivered], *, decodes: bool) -> dict[str, Any]:
    """Return the medians of a row. Of the times that engines report for a version, the slowest engine's counts."""

    def median(of: Callable[[_Delivered], float]) -> float:
        return statistics.median(map(of, delivered))

    def slowest(name: str) -> float:
        return median(lambda one: max(float(getattr(taken, name)) for taken in one.taken))

    def since_publish(name: str) -> float:
        return median(lambda one: max(getattr(taken, name) for taken in one.taken) - one.published.began)

    wire = median(lambda one: _wire_bytes(one.published.manifest))
    whole = sum(entry.nbytes for entry in delivered[0].published.manifest.entries)
    seconds, fetch = since_publish("proved_at"), slowest("fetch_seconds")
    copy = median(lambda one: one.copy_seconds)
    found: dict[str, Any] = {
        **msgspec.to_builtins(row),
        "sent": sorted({one.published.manifest.kind for one in delivered}),
        "bytes_on_the_wire": wire,
        "bytes_of_weights": whole,
        "wire_over_weights": wire / whole,
        "acknowledged_seconds": seconds,
        "trainer_lost_seconds": median(lambda one: one.published.lost_seconds),
        "trainer_lost_over_copy": median(lambda one: one.published.lost_seconds / one.published.copy_seconds),
        "ready_seconds": median(lambda one: one.published.ready_seconds),
        "fetch_seconds": fetch,
        **{f"{name}_seconds": slowest(f"{name}_seconds") for name in ("stage", "swap", "canary")},
        "gb_per_second": wire / seconds / 1e9,
        "copy_gb_per_second": wire / copy / 1e9,
        "ratio_to_copy": copy / seconds,
    }
    if row.transport == "tcp":
        bare = median(lambda one: one.socket_seconds)
        found |= {"socket_gb_per_second": wire / bare / 1e9, "ratio_to_socket": bare / seconds}
        found["fetch_ratio_to_socket"] = bare / fetch
    if decodes:
        step, first = slowest("step_seconds"), since_publish("first_token_at")
        found |= {"step_seconds": step, "first_token_seconds": first, "first_token_beyond_a_step_seconds": first - step}
        legs = [_legs(one.published, max(one.taken, key=lambda taken: taken.first_token_at)) for one in delivered]
        found |= {f"leg_{name}_seconds": statistics.median(leg[name] for leg in legs) for name in LEGS}
    return found


def _legs(published: Published, taken: Taken) -> dict[str, float]:
    """Return the seconds of each part of the time from the publish to the first token; see `LEGS`."""
    moments = [
        published.began,
        published.began + published.lost_seconds,
        published.began + published.ready_seconds,
        taken.received_at,
        taken.staged_at,
        taken.install_began_at,
        taken.installed_at,
        taken.last_token_at,
        taken.first_token_at,
    ]
    return {name: end - start for name, start, end in zip(LEGS, moments, moments[1:], strict=False)}


def _wire_bytes(manifest: Manifest) -> int:
    """Return the number of bytes at the location that the manifest names, including gaps between tensors."""
    return max(entry.offset + entry.nbytes for entry in manifest.payload or manifest.entries)


def _environment(number: int) -> dict[str, str]:
    """Return the environment variables that let several processes use NCCL on one GPU.

    NCCL accepts that only if it believes that the processes are on different hosts. Then it needs a network interface.
    """
    return {"NCCL_HOSTID": f"bench-{number}", "NCCL_SOCKET_IFNAME": "lo"}

"""`headrace bench delivery`: measures what the delivery of a new version costs, by transport and by what is sent.

The real publisher and the real receivers work in processes of their own, as in a run. If an engine does not prove a
version, the benchmark fails, so every figure is of proved versions. Two sets of weights are published in turn. They
differ in the last bit of a given share of words, as after a small optimizer step. The two sets of an adapter differ
everywhere, as after any step.

With `--decode`, each engine decodes a full batch all the time: a sequence that ends is replaced by a new one. Staging
runs beside the steps, and the swap is measured as the time by which it delays them. Without `--decode`, nothing runs
beside the deliveries, and the canary is scored last and timed by itself.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from headrace.bench.base import Weights, begin, choose_dtype, copy_seconds, vocabulary_of
from headrace.bench.delivery_sides import (
    RANK,
    Begin,
    Connection,
    Publish,
    Published,
    PublisherProcess,
    Ready,
    Side,
    load_served,
)
from headrace.bench.engine_checks import plain_twin, score_canary
from headrace.bench.options import DeliveryBench, Say, median_seconds
from headrace.config.schema import EngineConfig
from headrace.delivery.base import Kind, Manifest, Proof
from headrace.delivery.copying import threads_here
from headrace.delivery.digest import digest
from headrace.delivery.plan import packed_bytes
from headrace.delivery.receiver import Receiver, Staged, Staging
from headrace.delivery.transports import WITHOUT_GPU
from headrace.delivery.transports.tcp_wire import BUCKET_BYTES
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.engine import EngineLoop
from headrace.engines.embedded.setup import give_way_to_decoding
from headrace.errors import DeliveryError, HeadraceError, UserError
from headrace.models.loading import named_weights

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
LEAST_BANDWIDTH = 0.7
"""The share of a plain copy's bandwidth that a swap in one copy should reach."""
PROMPT = 16
LONGEST = 512
"""The length of a sequence in tokens, including its prompt."""
PROOF_SECONDS = 300.0
_POLL_SECONDS = 0.0001
_WARM_TOKENS = 32
"""How many tokens each sequence has before the first delivery, so that kernels are loaded and graphs captured."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: a transport, and what it sends."""

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
            engine = Side("headrace.bench.delivery", first, _environment(number + 1))
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
            if options.staging == "none":
                measured[-1] |= _pause(measured[-1], publisher.proof)
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
    wire = packed_bytes(published.manifest.payload or published.manifest.entries)
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

    wire = median(lambda one: packed_bytes(one.published.manifest.payload or one.published.manifest.entries))
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
        if fetch:  # An engine in one copy fetches in its pause.
            found["fetch_ratio_to_socket"] = bare / fetch
    if decodes:
        step, first = slowest("step_seconds"), since_publish("first_token_at")
        found |= {"step_seconds": step, "first_token_seconds": first, "first_token_beyond_a_step_seconds": first - step}
        legs = [_legs(one.published, max(one.taken, key=lambda taken: taken.first_token_at)) for one in delivered]
        found |= {f"leg_{name}_seconds": statistics.median(leg[name] for leg in legs) for name in LEGS}
    return found


def _pause(row: dict[str, Any], proof: dict[str, float]) -> dict[str, float]:
    """Return how long an engine in one copy sampled nothing, and the limit that this is compared with.

    The limit is the time of a copy at `LEAST_BANDWIDTH` of the bandwidth of a plain copy, and of the proof.
    """
    digest_seconds = proof.get("all_cores_digest_seconds", proof["digest_seconds"])
    copy = row["bytes_of_weights"] / (LEAST_BANDWIDTH * row["copy_gb_per_second"] * 1e9)
    return {
        "pause_seconds": row["swap_seconds"] + row["canary_seconds"],
        "pause_limit_seconds": copy + digest_seconds + row["canary_seconds"],
    }


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


def _environment(number: int) -> dict[str, str]:
    """Return the environment variables that let several processes use NCCL on one GPU.

    NCCL accepts that only if it believes that the processes are on different hosts. Then it needs a network interface.
    """
    return {"NCCL_HOSTID": f"bench-{number}", "NCCL_SOCKET_IFNAME": "lo"}


# ---- the process of an engine


class Taken(msgspec.Struct, kw_only=True):
    """The answer to a manifest: whether the version was proved, and how long each part took.

    Fields that end in `_at` are times of the monotonic clock, which all processes of a host share.
    """

    refused: str = ""
    """Why the version was not accepted; empty if it was."""
    live_digest: int = 0
    """The digest of the live weights after a version was not accepted; 0 if it was."""
    fetch_seconds: float = 0.0
    stage_seconds: float = 0.0
    """The time to fetch and check the version. It includes `fetch_seconds`."""
    swap_seconds: float = 0.0
    """The time of the copy over the live weights and of their digest. For a decoding engine: the time by which the swap
    delayed its steps."""
    proved_at: float = 0.0
    """When the version was proved or refused. For an engine that only holds weights, the canary is not included."""
    canary_seconds: float = 0.0
    """The time to score the canary; 0 for a decoding engine, which scores it beside its steps."""
    received_at: float = 0.0
    staged_at: float = 0.0
    install_began_at: float = 0.0
    installed_at: float = 0.0
    """When the copy was launched. It runs after the steps that were launched before it."""
    last_token_at: float = 0.0
    """When the host got the last token of the old version; at least `installed_at`."""
    first_token_at: float = 0.0
    step_seconds: float = 0.0
    """The mean time of a decode step since the delivery before."""


def _hold(line: Connection, begun: Begin) -> None:
    """Take versions as an engine that only holds weights. The plain model scores the canary."""
    model, adapter, base = load_served(begun)
    weights = adapter.weights() if adapter else named_weights(model)
    receiver = Receiver(weights, begun.name, _keys(begun), adapter.apply if adapter else None, base, _staging(begun))
    twin = plain_twin(model)
    line.send(Ready())
    with contextlib.closing(receiver):
        while True:
            try:
                staged = receiver.stage(line.receive(Manifest))
            except DeliveryError as error:
                line.send(_refused(str(error), weights))
                continue
            began = time.monotonic()
            with torch.no_grad():
                installed = receiver.install(staged)
            while not installed.ready():
                _check_time(staged.manifest, began)
                time.sleep(_POLL_SECONDS)
            proved_at = time.monotonic()
            logprobs = score_canary(twin, staged.manifest.canary.token_ids)
            canary = time.monotonic() - proved_at
            line.send(
                Taken(
                    refused=receiver.prove(installed, logprobs).reason,
                    fetch_seconds=staged.fetch_seconds,
                    stage_seconds=staged.seconds,
                    swap_seconds=proved_at - began,
                    proved_at=proved_at,
                    canary_seconds=canary,
                )
            )


class _TimedCore(EngineCore):
    """An engine core that notes in `taken` when each part of the last delivery happened."""

    taken = Taken()

    def stage(self, manifest: Manifest) -> Staged:
        self.taken = Taken()
        staged = super().stage(manifest)
        self.taken.fetch_seconds, self.taken.stage_seconds = staged.fetch_seconds, staged.seconds
        self.taken.staged_at = time.monotonic()
        return staged

    def install(self, staged: Staged) -> None:
        timings = self.timings
        self.taken.step_seconds = (timings.device_seconds or timings.host_seconds) / max(1, timings.steps)
        timings.reset()
        self.taken.install_began_at = time.monotonic()
        super().install(staged)
        self.taken.installed_at = self.taken.last_token_at = time.monotonic()

    def step(self) -> list[Delta]:
        known = self._generated
        deltas = super().step()
        if self._generated > known and self.drawn_version < self._live:
            self.taken.last_token_at = time.monotonic()
        return deltas

    def proof(self, *, wait: bool) -> Proof | None:
        if (proof := super().proof(wait=wait)) is not None:
            self.taken.proved_at = time.monotonic()
        return proof


class _DecodingEngine:
    """An engine that decodes a full batch all the time, driven by the loop that drives an engine in a run."""

    def __init__(self, begun: Begin) -> None:
        model, adapter, base = load_served(begun)
        rows = begun.options.decode
        positions = int(getattr(model.config.get_text_config(), "max_position_embeddings", LONGEST))
        self._longest = min(LONGEST, positions)
        # Layers are compiled, as in a run. Compiled steps are shorter, and new weights wait for a step to end.
        config = EngineConfig(
            kv="keep", slots=rows, cache_tokens=(rows + 1) * (self._longest + 64), staging=_staging(begun)
        )
        self._weights = adapter.weights() if adapter else named_weights(model)
        self._core = _TimedCore(
            model,
            config,
            name=begun.name,
            max_length=self._longest,
            version=0,
            adapter=adapter,
            base_digest=base,
            keys=_keys(begun),
        )
        self._draw = np.random.default_rng(begun.options.seed)
        self._vocabulary = vocabulary_of(model)
        self._submitted = 0
        self._core.submit(self._requests(rows))
        while self._core.counters().generated_tokens < rows * _WARM_TOKENS:
            self._replace(self._core.step())
        self.loop = EngineLoop(self._core, self._replace)

    def take(self, manifest: Manifest, received_at: float) -> Taken:
        """Load a version while the engine decodes. Return once it is proved and a token was drawn under it."""
        proof = self.loop.load(manifest).result(PROOF_SECONDS)
        if not proof.accepted:
            return _refused(proof.reason, self._weights)
        while self._core.drawn_version < manifest.version:
            _check_time(manifest, received_at)
            time.sleep(_POLL_SECONDS)
        taken = self._core.taken
        taken.received_at, taken.first_token_at = received_at, self._core.drawn_at
        # Without a GPU there is no gap between launches: decoding waits for the whole call of `install`.
        taken.swap_seconds = self._core.timings.longest_gap_seconds or taken.installed_at - taken.install_began_at
        return taken

    def _replace(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.finish == "failed":
                raise HeadraceError(f"the engine failed: {delta.error}")
            if delta.finish == "length":
                self._core.submit(self._requests(1))

    def _requests(self, count: int) -> list[Request]:
        first, self._submitted = self._submitted, self._submitted + count
        return [
            Request(
                id=f"row-{number}",
                token_ids=self._draw.integers(0, self._vocabulary, PROMPT).astype(np.int32),
                sampling=Sampling(max_tokens=self._longest - PROMPT, seed=number),
            )
            for number in range(first, self._submitted)
        ]


def _decode(line: Connection, begun: Begin) -> None:
    """Take versions as an engine that decodes. Versions are received beside the thread that makes the steps."""
    engine = _DecodingEngine(begun)
    # The process of a real engine does the same, once everything is loaded.
    give_way_to_decoding()
    line.send(Ready())

    def receive() -> None:
        try:
            while True:
                manifest = line.receive(Manifest)
                line.send(engine.take(manifest, time.monotonic()))
        except EOFError:
            return
        finally:
            engine.loop.stop()

    threading.Thread(target=receive, name="versions", daemon=True).start()
    engine.loop.run()


def _refused(why: str, live: Weights) -> Taken:
    return Taken(refused=why, proved_at=time.monotonic(), live_digest=digest(live.items()))


def _staging(begun: Begin) -> Staging:
    """Return where the engine of this benchmark stages a version."""
    return "none" if begun.options.staging == "none" else "host" if begun.options.staging == "host" else "device"


def _keys(begun: Begin) -> Path | None:
    return Path(begun.keys) if begun.keys else None


def _check_time(manifest: Manifest, began: float) -> None:
    if time.monotonic() - began > PROOF_SECONDS:
        raise DeliveryError(f"version {manifest.version} was not proved within {PROOF_SECONDS:g} s")


def serve(line: Connection) -> None:
    """Load the model, and take versions until the connection is closed."""
    begun = line.receive(Begin)
    torch.set_num_threads(begun.options.threads)
    try:
        (_decode if begun.options.decode else _hold)(line, begun)
    except EOFError:
        return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

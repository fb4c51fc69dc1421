"""`headrace bench delivery`: measures what the delivery of a new version costs, by transport and by what is sent.

The trainer and each engine are replaced by processes of their own, in which the real publisher and the real receivers
work, as in a run. If an engine does not prove a version, the benchmark fails, so every figure is of proved versions.

Two sets of weights are published in turn. They differ in the last bit of a given share of words, because small
optimizer steps cause such deltas. The two sets of an adapter differ everywhere, as the tensors of an adapter do after
any step.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.bench.base import begin, choose_dtype, copy_seconds, load, vocabulary_of
from headrace.bench.delivery_engine import RANK, Enter, Taken, served_adapter
from headrace.bench.engine_checks import install, plain_twin, score_canary
from headrace.bench.options import DeliveryBench, check_options
from headrace.bench.plain_copies import Weights, proof_seconds, socket_seconds
from headrace.bench.publishing import Begin, PublisherProcess, PublishReply, canary_tokens, save_sets
from headrace.bench.report import Say
from headrace.bench.side import Ready, Side
from headrace.delivery.base import Kind, Manifest
from headrace.delivery.copying import threads_here
from headrace.delivery.transports import WITHOUT_GPU
from headrace.errors import DeliveryError, UserError
from headrace.models.loading import named_weights
from headrace.types import Float32Array, Int32Array

KINDS: tuple[Kind, ...] = ("full", "delta", "adapter")
DEADLINE = 600.0
WARM_UP = 2
"""The number of first versions that are not measured, so that both places to which versions are written in turn have
been used before."""
WITHIN_SECONDS = 0.02
"""If engines decode, each publish is delayed by a random time of at most this many seconds, which is several steps of a
GPU. Otherwise every version would arrive at the same point of a step."""
LEGS = ("snapshot", "digest", "travel", "stage", "notice", "install", "under_way", "first_step")
"""The parts of the time from the publish to the first token of the new version, in order. `snapshot`: the trainer
copies its weights. `digest`: the copy is digested, until the version can be fetched. `travel`: the manifest goes to the
engine. `stage`: the engine fetches and digests the weights. `notice`: the staged weights wait until the engine is
between two steps. `install`: the engine launches the copy over its live weights. `under_way`: the steps that were
launched before end. `first_step`: the copy runs, and the first step with the new weights."""
_SPREAD = 0.02
"""The standard deviation of an adapter's random entries."""


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


@dataclass(frozen=True)
class Sets:
    """The two sets of weights that are published in turn."""

    weights: tuple[Weights, Weights]
    """The sets, in host memory."""
    logprobs: list[Float32Array]
    """The log-probabilities of the canary under each set."""
    canary: Int32Array
    base_digest: int
    """The digest of the weights under an adapter; 0 without an adapter."""


@torch.inference_mode()
def make_sets(options: DeliveryBench, model: Any, kind: Kind) -> Sets:
    """Return two sets of what a trainer of this model would send. The model has the second set afterwards."""
    draw = torch.Generator().manual_seed(options.seed)
    canary, logprobs = canary_tokens(vocabulary_of(model)), []
    adapter, base = served_adapter(model) if kind == "adapter" else (None, 0)
    if adapter is not None:
        live = adapter.weights()
        pair = (_random(live, options.dtype, draw), _random(live, options.dtype, draw))
    else:
        first = {name: tensor.to("cpu", copy=True) for name, tensor in named_weights(model).items()}
        pair = (first, {name: flip_words(tensor, options.changed, draw) for name, tensor in first.items()})
    twin = plain_twin(model)
    for weights in pair:
        if adapter is None:
            install(model, weights)
        else:
            for name, tensor in adapter.weights().items():
                tensor.copy_(weights[name])
            adapter.apply()
        logprobs.append(score_canary(twin, canary))
    return Sets(pair, logprobs, canary, base)


def flip_words(tensor: torch.Tensor, share: float, draw: torch.Generator) -> torch.Tensor:
    """Return a copy in which the last bit is flipped in this share of words, chosen at random."""
    changed = tensor.clone()
    count = round(share * tensor.numel())
    if not count or not tensor.is_floating_point():
        return changed
    words = changed.view(-1).view(torch.int16 if tensor.itemsize == 2 else torch.int32)
    chosen = torch.randperm(len(words), generator=draw)[:count]
    words[chosen] ^= 1
    return changed


def _random(like: Weights, dtype: str, draw: torch.Generator) -> Weights:
    return {
        name: (_SPREAD * torch.randn(tensor.shape, generator=draw)).to(getattr(torch, dtype))
        for name, tensor in like.items()
    }


@dataclass(frozen=True)
class _Delivered:
    """The measurements of one version."""

    done: PublishReply
    manifest: Manifest
    taken: list[Taken]
    copy_seconds: float
    """The time of a plain copy of as many bytes as were sent, measured just after the delivery."""
    socket_seconds: float
    """The time to pass as many bytes through a bare loopback socket; 0 for transports other than tcp."""


def bench_delivery(options: DeliveryBench, say: Say) -> dict[str, Any]:
    """Measure and return all figures. `say` gets a line before each part."""
    check_options(options)
    device, found = begin("delivery", options, "--model-shape ")
    todo = rows(options, device)
    options = msgspec.structs.replace(options, device=device, dtype=choose_dtype(options.dtype, device))
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        found |= {name: getattr(options, name) for name in ("dtype", "threads", "engines")}
        found |= {"sharing_threads": threads_here(), "adapter_rank": RANK, "proof": {}, "rows": []}
        for kind in dict.fromkeys(row.send for row in todo):
            bench = _Bench(options, kind, say)
            found["proof"][kind] = bench.proof
            with bench.entered():
                found["rows"] += [bench.row(row) for row in todo if row.send == kind]
        return found
    finally:
        torch.set_num_threads(before)


class _Bench:
    """Two sets of weights of one kind (full, delta or adapter), which every measured transport carries in turn."""

    def __init__(self, options: DeliveryBench, kind: Kind, say: Say) -> None:
        self._options = options
        self._kind = kind
        self._say = say
        say(f"making two sets of weights ({kind}) of {options.model} in {options.dtype}")
        model = load(options.model, options.dtype, options.device, options.seed)
        self._sets = make_sets(options, model, kind)
        del model
        gc.collect()
        first = self._sets.weights[0]
        self.proof = {
            "bytes": sum(tensor.nbytes for tensor in first.values()),
            "tensors": len(first),
            **proof_seconds(first, options.device),
        }
        self._files: list[str] = []
        self._directory = Path()
        self._engines: list[Side] = []
        self._version = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Start the engines, which wait for weights inside this context.

        The sets are moved from this process to files, from which the publisher processes load them.
        """
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-"))
            self._directory = Path(made)
            self._files = save_sets(self._directory, self._sets.weights)
            self._sets = Sets(({}, {}), self._sets.logprobs, self._sets.canary, self._sets.base_digest)
            self._say(f"starting {self._options.engines} engine(s)")
            for number in range(self._options.engines):
                environment = _environment(number + 1)
                engine = Side("headrace.bench.delivery_engine", deadline=DEADLINE, environment=environment)
                stack.callback(engine.close)
                engine.tell(Enter(name=f"engine-{number}", options=self._options, adapter=self._kind == "adapter"))
                self._engines.append(engine)
            for engine in self._engines:
                engine.answer(Ready)
            yield

    def row(self, row: Row) -> dict[str, Any]:
        """Measure one row and return its figures."""
        options = self._options
        self._say(f"{row}: {options.versions} versions to {options.engines} engine(s)")
        with contextlib.closing(PublisherProcess(self._begin(row), DEADLINE, _environment(0))) as publisher:
            delivered = [self._deliver(publisher, row) for _ in range(WARM_UP + options.versions)][WARM_UP:]
        return _figures(row, delivered, decodes=bool(options.decode))

    def _deliver(self, publisher: PublisherProcess, row: Row) -> _Delivered:
        self._version += 1
        done = publisher.publish(self._version)
        assert done.manifest is not None
        for engine in self._engines:
            engine.tell(done.manifest)
        taken = [engine.answer(Taken) for engine in self._engines]
        for proof in (each.proof for each in taken):
            if not proof.accepted:
                raise DeliveryError(f"version {proof.version} was not accepted by {proof.engine}: {proof.reason}")
        publisher.acknowledged(self._version)
        # Compared right after each version, so that other work on the machine slows both down alike.
        wire = _wire_bytes(done.manifest)
        bare = socket_seconds(wire, repeats=1) if row.transport == "tcp" else 0.0
        return _Delivered(done, done.manifest, taken, copy_seconds(wire, self._options.device, repeats=1), bare)

    def _begin(self, row: Row) -> Begin:
        options = self._options
        return Begin(
            files=self._files,
            dtype=options.dtype,
            transport=row.transport,
            canary=self._sets.canary,
            logprobs=self._sets.logprobs,
            device=options.device,
            send=row.send,
            base_digest=self._sets.base_digest,
            per_parameter=row.per_parameter,
            receivers=options.engines,
            directory=str(self._directory / "weights"),
            threads=options.threads,
            compare=True,
            within_seconds=WITHIN_SECONDS if options.decode else 0.0,
        )


def _figures(row: Row, delivered: list[_Delivered], *, decodes: bool) -> dict[str, Any]:
    """Return the figures of a row. Of the times that engines report for a version, the slowest engine's counts."""
    wire = statistics.median(_wire_bytes(one.manifest) for one in delivered)
    whole = sum(entry.nbytes for entry in delivered[0].manifest.entries)
    seconds = _spread([max(taken.proved_at for taken in one.taken) - one.done.began for one in delivered])
    fetch = _slowest(delivered, "fetch_seconds")
    copy = statistics.median(one.copy_seconds for one in delivered)
    found: dict[str, Any] = {
        **msgspec.to_builtins(row),
        "sent": sorted({one.manifest.kind for one in delivered}),
        "bytes_on_the_wire": wire,
        "bytes_of_weights": whole,
        "wire_over_weights": wire / whole,
        "acknowledged_seconds": seconds,
        "trainer_lost_seconds": _spread([one.done.lost_seconds for one in delivered]),
        "trainer_lost_over_copy": statistics.median(one.done.lost_seconds / one.done.copy_seconds for one in delivered),
        "ready_seconds": _spread([one.done.ready_seconds for one in delivered]),
        "fetch_seconds": fetch,
        **{f"{name}_seconds": _slowest(delivered, f"{name}_seconds") for name in ("stage", "swap", "canary")},
        "gb_per_second": wire / seconds["median"] / 1e9,
        "copy_gb_per_second": wire / copy / 1e9,
        "ratio_to_copy": copy / seconds["median"],
    }
    if row.transport == "tcp":
        bare = statistics.median(one.socket_seconds for one in delivered)
        found |= {"socket_gb_per_second": wire / bare / 1e9, "ratio_to_socket": bare / seconds["median"]}
        found["fetch_ratio_to_socket"] = bare / fetch["median"]
    if decodes:
        step = statistics.median(max(taken.step_seconds for taken in one.taken) for one in delivered)
        first = [max(taken.first_token_at for taken in one.taken) - one.done.began for one in delivered]
        found |= {"step_seconds": step, "first_token_seconds": _spread(first)}
        found["first_token_beyond_a_step_seconds"] = found["first_token_seconds"]["median"] - step
        legs = [_legs(one.done, max(one.taken, key=lambda taken: taken.first_token_at)) for one in delivered]
        found |= {f"leg_{name}_seconds": _spread([leg[name] for leg in legs]) for name in LEGS}
    return found


def _legs(done: PublishReply, taken: Taken) -> dict[str, float]:
    """Return the seconds of each part of the time from the publish to the first token; see `LEGS`."""
    moments = [
        done.began,
        done.began + done.lost_seconds,
        done.began + done.ready_seconds,
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


def _slowest(delivered: list[_Delivered], name: str) -> dict[str, float]:
    return _spread([max(float(getattr(taken, name)) for taken in one.taken) for one in delivered])


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _environment(number: int) -> dict[str, str]:
    """Return the environment variables that let several processes use NCCL on one GPU.

    NCCL accepts that only if it believes that the processes are on different hosts. Then it needs a network interface.
    """
    return {"NCCL_HOSTID": f"bench-{number}", "NCCL_SOCKET_IFNAME": "lo"}

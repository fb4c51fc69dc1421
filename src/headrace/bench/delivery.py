"""`headrace bench delivery`: measures what the delivery of a new version costs, by transport and by what is sent.

The trainer and each engine are replaced by processes of their own, in which the real publisher and the real receivers
work, as in a run. If an engine does not prove a version, the benchmark fails, so every figure is of proved versions.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from headrace.bench.delivery_messages import Enter, Entered, Take, Taken
from headrace.bench.delivery_options import RANK, DeliveryBench, Row, check_options, rows
from headrace.bench.delivery_plain import copy_seconds, proof_seconds, socket_seconds
from headrace.bench.delivery_sets import Sets, check_model_name, load, make_sets
from headrace.bench.engine_swaps import CANARY_TOLERANCE
from headrace.bench.publishing import Begin, PublisherProcess, PublishReply, save_sets
from headrace.bench.side import Side
from headrace.delivery.base import Kind, Manifest
from headrace.delivery.cores import threads_here
from headrace.errors import DeliveryError, UserError

Say = Callable[[str], None]

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
    check_model_name(options.model)
    device = _device(options.device)
    todo = rows(options, device)
    dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        found = _head(options, device, dtype)
        for kind in dict.fromkeys(row.send for row in todo):
            bench = _Bench(options, device, dtype, kind, say)
            found["proof"][kind] = bench.proof
            with bench.entered():
                found["rows"] += [bench.row(row) for row in todo if row.send == kind]
        return found
    finally:
        torch.set_num_threads(before)


class _Bench:
    """Two sets of weights of one kind (full, delta or adapter), which every measured transport carries in turn."""

    def __init__(self, options: DeliveryBench, device: str, dtype: str, kind: Kind, say: Say) -> None:
        self._options = options
        self._device = device
        self._dtype = dtype
        self._say = say
        say(f"making two sets of weights ({kind}) of {options.model} in {dtype}")
        self._sets: Sets = make_sets(options, load(options.model, dtype, device, options.seed), dtype, kind)
        gc.collect()
        first = self._sets.weights[0]
        self.proof = {
            "bytes": sum(tensor.nbytes for tensor in first.values()),
            "tensors": len(first),
            **proof_seconds(first, device),
        }
        self._adapter = kind == "adapter"
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
                engine = Side("headrace.bench.delivery_engine", environment=_environment(number + 1))
                stack.callback(engine.close)
                engine.tell(self._enter(number))
                self._engines.append(engine)
            for engine in self._engines:
                engine.answer(Entered, DEADLINE)
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
            engine.tell(Take(manifest=done.manifest))
        taken = [engine.answer(Taken, DEADLINE) for engine in self._engines]
        for each in taken:
            if not each.proof.accepted:
                proof = each.proof
                raise DeliveryError(f"version {proof.version} was not accepted by {proof.engine}: {proof.reason}")
        publisher.acknowledged(self._version)
        # Compared right after each version, so that other work on the machine slows both down alike.
        wire = _wire_bytes(done.manifest)
        bare = socket_seconds(wire, repeats=1) if row.transport == "tcp" else 0.0
        return _Delivered(done, done.manifest, taken, copy_seconds(wire, self._device, repeats=1), bare)

    def _begin(self, row: Row) -> Begin:
        return Begin(
            files=self._files,
            dtype=self._dtype,
            transport=row.transport,
            tolerance=CANARY_TOLERANCE[self._dtype],
            canary=self._sets.canary,
            logprobs=self._sets.logprobs,
            device=self._device,
            send=row.send,
            base_digest=self._sets.base_digest,
            per_parameter=row.per_parameter,
            receivers=self._options.engines,
            directory=str(self._directory / "weights"),
            threads=self._options.threads,
            compare=True,
            within_seconds=WITHIN_SECONDS if self._options.decode else 0.0,
        )

    def _enter(self, number: int) -> Enter:
        options = self._options
        return Enter(
            name=f"engine-{number}",
            model=options.model,
            dtype=self._dtype,
            device=self._device,
            seed=options.seed,
            threads=options.threads,
            adapter=self._adapter,
            decode=options.decode,
        )


def _figures(row: Row, delivered: list[_Delivered], *, decodes: bool) -> dict[str, Any]:
    """Return the figures of a row. Of the times that engines report for a version, the slowest engine's counts."""
    wire = statistics.median(_wire_bytes(one.manifest) for one in delivered)
    whole = sum(entry.nbytes for entry in delivered[0].manifest.entries)
    seconds = _spread([max(taken.proved_at for taken in one.taken) - one.done.began for one in delivered])
    fetch = _slowest(delivered, "fetch_seconds")
    lost = _spread([one.done.lost_seconds for one in delivered])
    copy = statistics.median(one.copy_seconds for one in delivered)
    found: dict[str, Any] = {
        **msgspec.to_builtins(row),
        "sent": sorted({one.manifest.kind for one in delivered}),
        "bytes_on_the_wire": wire,
        "bytes_of_weights": whole,
        "wire_over_weights": wire / whole,
        "acknowledged_seconds": seconds,
        "trainer_lost_seconds": lost,
        "trainer_lost_over_copy": statistics.median(one.done.lost_seconds / one.done.copy_seconds for one in delivered),
        "ready_seconds": _spread([one.done.ready_seconds for one in delivered]),
        "fetch_seconds": fetch,
        "stage_seconds": _slowest(delivered, "stage_seconds"),
        "swap_seconds": _slowest(delivered, "swap_seconds"),
        "canary_seconds": _slowest(delivered, "canary_seconds"),
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


def _head(options: DeliveryBench, device: str, dtype: str) -> dict[str, Any]:
    return {
        "bench": "delivery",
        "model": options.model,
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "dtype": dtype,
        "threads": options.threads,
        "sharing_threads": threads_here(),
        "engines": options.engines,
        "adapter_rank": RANK,
        "torch": torch.__version__,
        "arguments": msgspec.to_builtins(options),
        "proof": {},
        "rows": [],
    }


def _device(asked: str) -> str:
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no GPU here")
    return asked if asked != "auto" else "cuda" if torch.cuda.is_available() else "cpu"

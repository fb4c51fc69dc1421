"""Delivers new versions to a decoding engine at a fixed interval, and measures how long decoding stops for each.

Versions are published, staged and proved as in a run, and swapped in between two steps. Publishing runs in a process of
its own, and staging in a thread, so only the swap stops decoding. Two sets of weights take turns. They differ so much
that a token tagged with the wrong version is found by its log-probability.
"""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.base import vocabulary_of
from headrace.bench.engine_checks import install, score_canary
from headrace.bench.engine_rounds import Round
from headrace.bench.plain_copies import Weights
from headrace.bench.publishing import Begin, PublisherProcess, PublishReply, canary_tokens, save_sets
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Staged
from headrace.engines.embedded.core import EngineCore
from headrace.errors import DeliveryError, HeadraceError
from headrace.models.loading import named_weights
from headrace.types import Float32Array

DEADLINE = 300.0
_CHANGE = 0.2
"""The standard deviation of the change from the first set to the second, relative to each weight."""


@torch.inference_mode()
def two_sets(model: Any, seed: int) -> tuple[Weights, Weights]:
    """Return the model's weights and a changed set, both in host memory."""
    draw = torch.Generator(model.device).manual_seed(seed)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=draw, device=tensor.device)
        return tensor * (1 + _CHANGE * noise).to(tensor.dtype)

    live = named_weights(model)
    first = {name: tensor.to("cpu", copy=True) for name, tensor in live.items()}
    return first, {name: changed(tensor).to("cpu", copy=True) for name, tensor in live.items()}


@dataclass(frozen=True)
class Swap:
    """The measurements of one swap."""

    at: float
    """When the swap began."""
    version: int
    stall_seconds: float
    """How long decoding stood still. On a GPU: the longest gap between two launches of steps, from the beginning of
    staging until the weights were proved. The copy of the weights is part of that gap."""
    copy_seconds: float
    stage_seconds: float
    """How long staging took, while decoding continued."""


class SwapStream:
    """Swaps weights every `every` seconds inside its context. The caller calls `tick` between two steps.

    Entering the context installs one version, because in a run too an engine has weights before it serves. `every` is
    the time from one `install` to the beginning of the next staging. So if a swap is late, all later ones are late too.
    """

    def __init__(self, core: EngineCore, publisher: PublisherProcess, *, every: float) -> None:
        """Publish the first version. The publisher is closed when the context ends."""
        self.swaps: list[Swap] = []
        self._core = core
        self._every = every
        self._publisher = publisher
        self._orders = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._stager = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stage")
        self._version = core.version + 1
        self._published = self._publish(self._version)
        self._staged: Future[Staged] | None = None
        self._installed = False
        self._due = self._began = self._stood_still = 0.0
        self._prefilled = -1

    def __enter__(self) -> SwapStream:
        with ExitStack() as undo:
            undo.callback(self._close)
            staged = self._core.stage(_manifest(self._published.result(DEADLINE)))
            _check(self._core.swap(staged))
            undo.pop_all()
        self._published = self._publish(self._version + 1)
        self._acknowledge()
        self._due = time.perf_counter() + self._every
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def tick(self) -> None:
        """Do what the next version needs now, without waiting: stage it, install it, or look for its proof.

        Publishing runs in another process and staging in another thread, so decoding continues beside them. Decoding
        also continues while the new weights are proved.
        """
        before, self._prefilled = self._prefilled, self._core.counters().prefilled_tokens
        if self._staged is None:
            # Staging waits too, because staged weights are installed as soon as possible.
            if self._published.done() and time.perf_counter() >= self._due:
                self._core.timings.longest_gap_seconds = 0.0
                self._staged = self._stager.submit(self._core.stage, _manifest(self._published.result()))
        elif self._installed:
            self._prove(self._staged.result())
        # A prompt that is partly computed would get keys and values of two versions.
        elif self._staged.done() and self._prefilled == before:
            self._install(self._staged.result())

    def _install(self, staged: Staged) -> None:
        self._began = time.perf_counter()
        self._core.install(staged)
        # Without a GPU there is no gap between launches: decoding waits for the whole call of `install`.
        self._stood_still = time.perf_counter() - self._began
        self._installed = True
        # In a run too, the trainer makes the next version while the engine serves this one.
        self._published = self._publish(self._version + 1)

    def _prove(self, staged: Staged) -> None:
        proof = self._core.proof(wait=False)
        if proof is None:
            return
        _check(proof)
        stall = self._core.timings.longest_gap_seconds or self._stood_still
        self.swaps.append(Swap(self._began, proof.version, stall, proof.swap_seconds, staged.seconds))
        self._due = self._began + self._every
        self._staged, self._installed = None, False
        self._acknowledge()

    def _publish(self, version: int) -> Future[PublishReply]:
        return self._orders.submit(self._publisher.publish, version)

    def _acknowledge(self) -> None:
        self._orders.submit(self._publisher.acknowledged, self._version)
        self._version += 1

    def _close(self) -> None:
        late = self._staged is not None and not wait([self._staged], DEADLINE).done
        self._stager.shutdown(wait=not late)
        self._orders.shutdown(wait=True)
        self._publisher.close()
        if late:
            raise HeadraceError(f"staging did not end within {DEADLINE:g} s")


def _manifest(reply: PublishReply) -> Manifest:
    assert reply.manifest is not None
    return reply.manifest


def _check(proof: Proof) -> None:
    if not proof.accepted:
        raise DeliveryError(f"version {proof.version} was not accepted: {proof.reason}")


def start_publisher(twin: Any, sets: tuple[Weights, Weights], dtype: str) -> PublisherProcess:
    """Start the process that publishes these sets in turn. `twin` scores the canary, and then has the first set."""
    canary = canary_tokens(vocabulary_of(twin))
    expected: list[Float32Array] = []
    # The first set is scored last, because the twin must have it afterwards.
    for weights in reversed(sets):
        install(twin, weights)
        expected.insert(0, score_canary(twin, canary))
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        begin = Begin(
            files=save_sets(Path(directory), sets),
            dtype=dtype,
            # The transport that `auto` chooses if trainer and engine are on one host.
            transport="cuda_ipc" if twin.device.type == "cuda" else "shm",
            device=str(twin.device),
            canary=canary,
            logprobs=expected,
        )
        # The process has loaded the files when this returns, so the directory can be removed.
        return PublisherProcess(begin, DEADLINE)


def swap_figures(swaps: list[Swap], run: Round, plain: Round, *, copy_seconds: float) -> dict[str, Any]:
    """Return the figures of a round with swaps, compared with a round without.

    `plain_rate` and `step_seconds` are those of the round without swaps. `copy_seconds` is the time of a copy of all
    weights at the bandwidth of the device.
    """
    stalls = [swap.stall_seconds for swap in swaps]
    rate, plain_rate = run.tokens / run.seconds, plain.tokens / plain.seconds
    return {
        "swaps": len(swaps),
        "interval_seconds": (swaps[-1].at - swaps[0].at) / (len(swaps) - 1) if len(swaps) > 1 else None,
        "stall_seconds": stalls,
        "stall_seconds_mean": float(np.mean(stalls)) if stalls else None,
        "stall_seconds_max": max(stalls, default=None),
        "copy_seconds_mean": float(np.mean([swap.copy_seconds for swap in swaps])) if swaps else None,
        "stage_seconds_mean": float(np.mean([swap.stage_seconds for swap in swaps])) if swaps else None,
        "copy_seconds": copy_seconds,
        # A swap may take as long as its copy at 70% of the bandwidth, and the step that it waits for.
        "stall_limit_seconds": copy_seconds / 0.7 + plain.seconds / plain.steps,
        "lost_seconds_a_swap": (run.seconds - run.tokens / plain_rate) / len(swaps) if swaps else None,
        "tokens_per_second_without": plain_rate,
        "tokens_per_second_with": rate,
        "loss": 1 - rate / plain_rate,
    }

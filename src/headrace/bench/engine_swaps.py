"""Delivers new versions to a decoding engine at a fixed interval, and measures how long decoding stops for each.

Versions are published, staged and proved as in a run, and swapped in between two steps. Publishing runs in a process of
its own, and staging in a thread, so only the swap stops decoding. Two sets of weights take turns. They differ so much
that a token tagged with the wrong version is found by its log-probability.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.engine_rescore import row_logprobs
from headrace.bench.publishing import Begin, PublisherProcess, PublishReply, Weights, save_sets
from headrace.delivery.base import Proof
from headrace.delivery.receiver import Staged
from headrace.engines.base import Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.errors import DeliveryError, HeadraceError
from headrace.models.loading import named_weights
from headrace.types import Int32Array

DEADLINE = 300.0
CANARY_TOKENS = 16
CANARY_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
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


@torch.inference_mode()
def install(model: Any, weights: Weights) -> None:
    """Copy these weights over those of the model."""
    for name, tensor in named_weights(model).items():
        tensor.copy_(weights[name])


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

    def __init__(
        self,
        core: EngineCore,
        twin: Any,
        sets: tuple[Weights, Weights],
        *,
        every: float,
        dtype: str,
        start: Callable[[Any, tuple[Weights, Weights], str], PublisherProcess] | None = None,
    ) -> None:
        """Start the process that publishes. `start` replaces the function that does so, for tests.

        The default scores the canary with `twin`, which has the first set of weights afterwards.
        """
        self.swaps: list[Swap] = []
        self._core = core
        self._every = every
        self._publisher = (start or _start_publisher)(twin, sets, dtype)
        self._orders = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._ready: queue.Queue[Staged | BaseException] = queue.Queue()
        self._swapped = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._stage_all, name="stage", daemon=True)
        self._due = 0.0
        self._prefilled = -1
        self._unproved: Staged | None = None
        self._began = 0.0
        self._stood_still = 0.0

    def __enter__(self) -> SwapStream:
        with ExitStack() as undo:
            undo.callback(self._end_publishing)
            self._install_first()
            undo.pop_all()
        self._due = time.perf_counter() + self._every
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._swapped.set()
        self._thread.join(DEADLINE)
        self._end_publishing()
        if self._thread.is_alive():
            raise HeadraceError(f"staging did not end within {DEADLINE:g} s")

    def tick(self) -> None:
        """Swap if weights are staged and the last step computed no prompt tokens.

        A prompt that is partly computed would get keys and values of two versions. Decoding continues while the new
        weights are proved.
        """
        if self._unproved is not None:
            self._prove(self._unproved)
            return
        before, self._prefilled = self._prefilled, self._core.counters().prefilled_tokens
        if self._ready.empty() or self._prefilled != before:
            return
        staged = self._ready.get_nowait()
        if isinstance(staged, BaseException):
            raise staged
        self._unproved, self._began = staged, time.perf_counter()
        self._core.install(staged)
        # Without a GPU there is no gap between launches: decoding waits for the whole call of `install`.
        self._stood_still = time.perf_counter() - self._began

    def _prove(self, staged: Staged) -> None:
        proof = self._core.proof(wait=False)
        if proof is None:
            return
        _check(proof)
        stall = self._core.timings.longest_gap_seconds or self._stood_still
        self.swaps.append(Swap(self._began, proof.version, stall, proof.swap_seconds, staged.seconds))
        self._due = self._began + self._every
        self._unproved = None
        self._swapped.set()

    def _end_publishing(self) -> None:
        self._orders.shutdown(wait=True)
        self._publisher.close()

    def _install_first(self) -> None:
        version = self._core.version + 1
        manifest = self._publish(version).result(DEADLINE).manifest
        assert manifest is not None
        _check(self._core.swap(self._core.stage(manifest)))
        self._orders.submit(self._publisher.acknowledged, version)

    def _stage_all(self) -> None:
        version = self._core.version + 1
        try:
            publishing = self._publish(version)
            while not self._stop.is_set():
                manifest = publishing.result(DEADLINE).manifest
                assert manifest is not None
                self._swapped.clear()
                # Staging waits too, because staged weights are installed as soon as possible.
                self._stop.wait(max(0.0, self._due - time.perf_counter()))
                self._core.timings.longest_gap_seconds = 0.0
                self._ready.put(self._core.stage(manifest))
                # In a run too, the trainer makes the next version while the engine serves this one.
                publishing = self._publish(version + 1)
                if not self._stop.is_set() and not self._swapped.wait(DEADLINE):
                    raise HeadraceError(f"version {version} was staged and not swapped for {DEADLINE:g} s")
                self._orders.submit(self._publisher.acknowledged, version)
                version += 1
        except (HeadraceError, OSError, RuntimeError) as error:
            # `tick` raises it in the thread that drives the engine. Here it would be lost with this thread.
            self._ready.put(error)

    def _publish(self, version: int) -> Future[PublishReply]:
        return self._orders.submit(self._publisher.publish, version)


def _check(proof: Proof) -> None:
    if not proof.accepted:
        raise DeliveryError(f"version {proof.version} was not accepted: {proof.reason}")


def _start_publisher(twin: Any, sets: tuple[Weights, Weights], dtype: str) -> PublisherProcess:
    canary = canary_tokens(int(twin.get_input_embeddings().weight.shape[0]))
    # The first set is scored last, because the twin must have it afterwards.
    expected = [_score(twin, weights, canary) for weights in reversed(sets)][::-1]
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as directory:
        begin = Begin(
            files=save_sets(Path(directory), sets),
            dtype=dtype,
            # The transport that `auto` chooses if trainer and engine are on one host.
            transport="cuda_ipc" if twin.device.type == "cuda" else "shm",
            device=str(twin.device),
            tolerance=CANARY_TOLERANCE[dtype],
            canary=canary,
            logprobs=expected,
        )
        # The process has loaded the files when this returns, so the directory can be removed.
        return PublisherProcess(begin, DEADLINE)


def canary_tokens(vocabulary: int) -> Int32Array:
    """Return a fixed sequence of tokens, which is scored at every delivery."""
    return (np.arange(CANARY_TOKENS) * 7919 % vocabulary).astype(np.int32)


def _score(twin: Any, weights: Weights, tokens: Int32Array) -> Any:
    install(twin, weights)
    return row_logprobs(twin, tokens[:1], tokens[1:], Sampling(max_tokens=1))


def swap_figures(
    swaps: list[Swap], *, seconds: float, tokens: int, plain_rate: float, copy_seconds: float, step_seconds: float
) -> dict[str, Any]:
    """Return the figures of a round with swaps, compared with a round without.

    `plain_rate` and `step_seconds` are those of the round without swaps. `copy_seconds` is the time of a copy of all
    weights at the bandwidth of the device.
    """
    stalls = [swap.stall_seconds for swap in swaps]
    rate = tokens / seconds
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
        "stall_limit_seconds": copy_seconds / 0.7 + step_seconds,
        "lost_seconds_a_swap": (seconds - tokens / plain_rate) / len(swaps) if swaps else None,
        "tokens_per_second_without": plain_rate,
        "tokens_per_second_with": rate,
        "loss": 1 - rate / plain_rate,
    }

"""Staging in a vLLM worker: a version is fetched and digested beside the live weights, which do not change.

Fetching runs in a separate thread, so that the worker continues to decode. A version with a wrong digest is never
handed out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from headrace.delivery.digest import digest
from headrace.delivery.plan import plan_digest, unpack
from headrace.delivery.transports import source
from headrace.delivery.transports.base import Source
from headrace.errors import DeliveryError
from headrace_vllm_plugin.adapter import Pristine
from headrace_vllm_plugin.wire import FetchOrder, StagingState


class WorkerStaging:
    """The staging of one worker, which holds at most one version.

    `begin` starts a fetch, `state` returns its state, and `take` hands the tensors out.
    """

    def __init__(self, device: torch.device, pristine: Callable[[], Pristine] | None = None) -> None:
        """`pristine` opens the weights that adapters are added to; it is called when the first adapter arrives."""
        self._device = device
        self._open_pristine = pristine
        self._pristine: Pristine | None = None
        self._sources: dict[str, Source] = {}
        self._buffer: torch.Tensor | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._state = StagingState(version=-1, done=True)
        self._thread: threading.Thread | None = None

    def begin(self, order: FetchOrder) -> None:
        """Start to fetch this version; a version that was staged earlier and not taken is discarded.

        Raises `DeliveryError` if another fetch is still running.
        """
        if not self._state.done:
            raise DeliveryError(f"cannot stage version {order.version}: version {self._state.version} is under way")
        self._weights = {}
        self._state = StagingState(version=order.version)
        self._thread = threading.Thread(target=self._fetch, args=(order,), name="headrace staging", daemon=True)
        self._thread.start()

    def state(self) -> StagingState:
        """Return the state of the last fetch."""
        return self._state

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """Return the tensors of this version; this works once, and the tensors are valid until the next `begin`."""
        if not self._weights or self._state.version != version:
            raise DeliveryError(f"version {version} is not staged")
        weights, self._weights = self._weights, {}
        return weights

    def close(self) -> None:
        """Close the transports and release the memory. Idempotent."""
        for opened in self._sources.values():
            opened.close()
        self._sources.clear()
        self._weights = {}
        self._buffer = self._pristine = None

    def _fetch(self, order: FetchOrder) -> None:
        started = time.monotonic()
        state = StagingState(version=order.version, done=True)
        try:
            with torch.no_grad():
                weights = self._fetched(order)
                state.digest = digest(weights.items())
            if state.digest != order.digest:
                raise DeliveryError(
                    f"version {order.version} arrived wrong: its digest is {state.digest:016x}, not {order.digest:016x}"
                )
            with torch.no_grad():
                self._weights = self._merged(order, weights) if order.scaling is not None else weights
        except (DeliveryError, OSError, RuntimeError, ValueError) as error:
            state.error = " ".join(str(error).split()) or type(error).__name__
        state.seconds = time.monotonic() - started
        self._state = state

    def _merged(self, order: FetchOrder, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert order.scaling is not None
        if self._pristine is None:
            if self._open_pristine is None:
                raise DeliveryError(f"version {order.version} is an adapter, and this worker has nothing to add it to")
            self._pristine = self._open_pristine()
        if self._pristine.digest() != order.base_digest:
            raise DeliveryError(
                f"version {order.version} is an adapter to weights with digest {order.base_digest:016x}, but this "
                f"server's model has {self._pristine.digest():016x}"
            )
        return self._pristine.with_adapter(adapter, order.scaling)

    def _fetched(self, order: FetchOrder) -> dict[str, torch.Tensor]:
        if plan_digest(order.entries) != order.plan_digest:
            raise DeliveryError(f"version {order.version} is packed by another plan than its manifest's")
        if order.transport not in self._sources:
            self._sources[order.transport] = source(order.transport, keys=Path(order.keys) if order.keys else None)
        opened = self._sources[order.transport]
        published = opened.open(order.location, order.version, order.entries)
        if opened.private and self._device.type == "cpu":
            weights = published
        else:
            nbytes = max(entry.offset + entry.nbytes for entry in order.entries)
            if self._buffer is None or len(self._buffer) < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            weights = unpack(self._buffer, order.entries)
            for name, tensor in published.items():
                weights[name].copy_(tensor)
        opened.verify(order.location, order.version)
        return weights

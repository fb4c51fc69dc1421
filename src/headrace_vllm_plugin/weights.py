"""The weights of a vLLM worker: a version is staged beside the live weights, and compared with them once it is loaded.

Fetching runs in a separate thread, so that the worker continues to decode, and on a GPU on a stream of its own. A
version with a wrong digest is never handed out. Weights that are in the memory of the trainer stay there until they are
loaded, because the trainer does not overwrite a version before the engine has answered; whether that held is checked
after the load. A LoRA adapter is merged into the pristine weights of the model, which come from the model's directory,
never from weights with an earlier adapter. After any number of swaps, the result therefore depends on the last adapter
only. An adapter that was trained on other weights is refused, because the digests differ.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from headrace.delivery.base import Canary, Manifest
from headrace.delivery.copying import all_on, copy_all
from headrace.delivery.digest import digest
from headrace.delivery.live import DeviceSide
from headrace.delivery.parts import fetch_parts
from headrace.delivery.plan import PackingPlan, Views, plan_of
from headrace.delivery.transports import source
from headrace.delivery.transports.base import Source
from headrace.errors import DeliveryError, HeadraceError
from headrace.types import NO_VERSION
from headrace_vllm_plugin.wire import FetchOrder, StagingState

_A, _B = ".lora_A.weight", ".lora_B.weight"


class Pristine:
    """The weights in a model's directory under their own names, cast to the serving dtype."""

    def __init__(self, directory: Path, dtype: torch.dtype, *, tied: bool = False) -> None:
        """Open the files of a model; with `tied`, ignore `lm_head.weight`, because the embedding is used instead."""
        self.weights: dict[str, torch.Tensor] = {}
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise DeliveryError(f"{directory} holds no safetensors to add an adapter to")
        for file in files:
            with safe_open(file, framework="pt") as opened:  # Mapped, so tensors that are never used cost no memory.
                for name in opened.keys():  # noqa: SIM118 - it is not a dictionary
                    self.weights[name] = opened.get_tensor(name).to(dtype)
        if tied:
            self.weights.pop("lm_head.weight", None)

    @functools.cached_property
    def digest(self) -> int:
        """The digest of all pristine weights; it must equal the trainer's digest of its base model."""
        return digest(self.weights.items())

    def with_adapter(self, adapter: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
        """Return all weights with the adapter merged.

        A weight with a LoRA pair becomes W + scaling * B @ A. A weight that was trained whole is replaced.
        """
        found = dict(self.weights)
        for name, tensor in adapter.items():
            target = name.removesuffix(_A).removesuffix(_B) + ".weight" if name.endswith((_A, _B)) else name
            if target not in self.weights:
                raise DeliveryError(f"the adapter changes {target}, which this server's model does not have")
            pristine = self.weights[target]
            if name.endswith((_A, _B)):
                stem = target.removesuffix(".weight")
                if stem + _A not in adapter or stem + _B not in adapter:
                    raise DeliveryError(f"the adapter has only one half of the pair of {target}")
            if name.endswith(_A):
                a, b = (adapter[stem + half].to(pristine.device, torch.float32) for half in (_A, _B))
                product = b @ a
                found[target] = torch.add(pristine.to(torch.float32), product, alpha=scaling).to(pristine.dtype)
            elif not name.endswith(_B):
                found[target] = tensor.to(pristine.device, pristine.dtype)
        return found


class WorkerStaging:
    """The staging of one worker, which holds at most one version."""

    def __init__(self, device: torch.device, pristine: Callable[[], Pristine], workers: int = 1) -> None:
        """`pristine` opens the weights that adapters are added to; it is called when the first adapter arrives.

        `workers` is the number of workers that share the model. A worker that is alone copies a version to its own
        device before the swap. Several workers each load a slice, so they copy nothing that they can read in place.
        """
        # With its index, because tensors are compared with it.
        self._device = torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
        self._alone = workers == 1
        self._gpu = DeviceSide(self._device) if device.type == "cuda" else None
        self._open_pristine = functools.cache(pristine)
        self._sources: dict[str, Source] = {}
        self._memory: Views | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._state = StagingState(version=-1, done=True)
        self._plan: PackingPlan | None = None
        self.taken_digest: int | None = None
        """The digest of the weights that `take` gives out: of merged weights, if the version is an adapter."""
        self._unread: tuple[Source, str, int] | None = None
        """Where the staged weights are, if they are in the memory of the trainer."""

    def begin(self, order: FetchOrder) -> None:
        """Start to fetch this version; a version that was staged earlier and not taken is discarded.

        Raises `DeliveryError` if another fetch is still running.
        """
        if not self._state.done:
            raise DeliveryError(f"cannot stage version {order.version}: version {self._state.version} is under way")
        self._weights = {}
        self._unread = None
        self._state = StagingState(version=order.version)
        threading.Thread(target=self._fetch, args=(order,), name="headrace staging", daemon=True).start()

    def state(self) -> StagingState:
        """Return the state of the last fetch."""
        return self._state

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """Return the tensors of this version; this works once, and the tensors are valid until the next `begin`.

        Call `check` after they were read: they may be in the memory of the trainer.
        """
        if not self._weights or self._state.version != version:
            raise DeliveryError(f"version {version} is not staged")
        weights, self._weights = self._weights, {}
        return weights

    def check(self) -> None:
        """Wait until all reads of the taken weights are done; raise `DeliveryError` if they have changed meanwhile."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._device)
        unread, self._unread = self._unread, None
        if unread is not None:
            opened, location, version = unread
            opened.verify(location, version)

    def digest(self, weights: Mapping[str, torch.Tensor]) -> int:
        """Return the digest of tensors that have names of the staged version, on the device where they are."""
        if self._plan is not None and self._gpu is not None and all(each.is_cuda for each in weights.values()):
            return self._gpu.digest(self._plan, weights)
        return digest(weights.items())

    def close(self) -> None:
        """Close the transports and release the memory. Idempotent."""
        for opened in self._sources.values():
            opened.close()
        self._sources.clear()
        self._weights = {}
        self._memory = self._unread = None
        if self._gpu is not None:
            self._gpu.close()
        self._open_pristine.cache_clear()

    def _fetch(self, order: FetchOrder) -> None:
        started = time.monotonic()
        state = StagingState(version=order.version, done=True, error="the fetch failed; the server's log says why")
        try:
            with torch.no_grad(), self._gpu.staging() if self._gpu is not None else nullcontext():
                weights = self._fetched(order)
                state.digest = self.digest(weights)
            if state.digest != order.digest:
                raise DeliveryError(
                    f"version {order.version} arrived wrong: its digest is {state.digest:016x}, not {order.digest:016x}"
                )
            self.taken_digest = state.digest
            if order.scaling is not None:
                with torch.no_grad():
                    weights = self._merged(order, weights)
                    self.taken_digest = self.digest(weights)
            self._weights = weights
            state.error = ""
        except (HeadraceError, OSError, RuntimeError, ValueError, SafetensorError) as error:
            state.error = " ".join(str(error).split()) or type(error).__name__
        finally:
            state.seconds = time.monotonic() - started
            self._state = state

    def _merged(self, order: FetchOrder, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert order.scaling is not None
        pristine = self._open_pristine()
        if pristine.digest != order.base_digest:
            raise DeliveryError(
                f"version {order.version} is an adapter to weights with digest {order.base_digest:016x}, but this "
                f"server's model has {pristine.digest:016x}"
            )
        self._unread = None
        return pristine.with_adapter(adapter, order.scaling)

    def _fetched(self, order: FetchOrder) -> dict[str, torch.Tensor]:
        plan = plan_of(order.entries)
        if plan.digest != order.plan_digest:
            raise DeliveryError(f"version {order.version} is packed by another plan than its manifest's")
        self._plan = plan
        if order.transport not in self._sources:
            keys = Path(order.keys) if order.keys else None
            self._sources[order.transport] = source(order.transport, keys=keys, device=str(self._device))
        opened = self._sources[order.transport]
        if order.parts:
            weights = self._own(plan)
            fetch_parts(opened, _manifest(order), weights)
            return weights
        published = opened.open(order.location, order.version, order.entries)
        if self._alone and not all_on(self._device, published):
            weights = self._own(plan)
            copy_all(weights, published, non_blocking=True)
            if self._gpu is not None:
                self._gpu.finish_staging()
        else:
            weights = published
            self._unread = None if opened.private else (opened, order.location, order.version)
        opened.verify(order.location, order.version)
        return weights

    def _own(self, plan: PackingPlan) -> dict[str, torch.Tensor]:
        """Return memory for all weights: on the device, or on the host if the device holds only a slice of them."""
        if self._memory is None or len(self._memory.packed) < plan.nbytes:
            device = self._device if self._alone else torch.device("cpu")
            self._memory = Views(torch.empty(plan.nbytes, dtype=torch.uint8, device=device))
        return self._memory.of(plan.entries)


def _manifest(order: FetchOrder) -> Manifest:
    """Return what an order says of a version, as the manifest that it was made from."""
    return Manifest(
        version=order.version,
        parent=NO_VERSION,
        step=0,
        transport=order.transport,
        location=order.location,
        entries=order.entries,
        plan_digest=order.plan_digest,
        digest=order.digest,
        canary=Canary(token_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32)),
        parts=order.parts,
    )

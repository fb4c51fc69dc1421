"""The weights of a vLLM worker: a version is staged beside the live weights, and compared with them once it is loaded.

Fetching runs in a separate thread, so that the worker continues to decode. A version with a wrong digest is never
handed out. A LoRA adapter is merged into the pristine weights of the model, which come from the model's directory,
never from weights with an earlier adapter. After any number of swaps, the result therefore depends on the last adapter
only. An adapter that was trained on other weights is refused, because the digests differ.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headrace.delivery.digest import digest
from headrace.delivery.digest_sums import MASK
from headrace.delivery.plan import packed_bytes, plan_digest, unpack
from headrace.delivery.transports import source
from headrace.delivery.transports.base import Source
from headrace.errors import DeliveryError
from headrace_vllm_plugin.wire import FetchOrder, Live, StagingState

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

    def __init__(self, device: torch.device, pristine: Callable[[], Pristine]) -> None:
        """`pristine` opens the weights that adapters are added to; it is called when the first adapter arrives."""
        self._device = device
        self._open_pristine = functools.cache(pristine)
        self._sources: dict[str, Source] = {}
        self._buffer: torch.Tensor | None = None
        self._weights: dict[str, torch.Tensor] = {}
        self._state = StagingState(version=-1, done=True)

    def begin(self, order: FetchOrder) -> None:
        """Start to fetch this version; a version that was staged earlier and not taken is discarded.

        Raises `DeliveryError` if another fetch is still running.
        """
        if not self._state.done:
            raise DeliveryError(f"cannot stage version {order.version}: version {self._state.version} is under way")
        self._weights = {}
        self._state = StagingState(version=order.version)
        threading.Thread(target=self._fetch, args=(order,), name="headrace staging", daemon=True).start()

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
        self._buffer = None
        self._open_pristine.cache_clear()

    def _fetch(self, order: FetchOrder) -> None:
        started = time.monotonic()
        state = StagingState(version=order.version, done=True, error="the fetch failed; the server's log says why")
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
            state.error = ""
        except (DeliveryError, OSError, RuntimeError, ValueError, SafetensorError) as error:
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
        return pristine.with_adapter(adapter, order.scaling)

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
            nbytes = packed_bytes(order.entries)
            if self._buffer is None or len(self._buffer) < nbytes:
                self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            weights = unpack(self._buffer, order.entries)
            for name, tensor in published.items():
                weights[name].copy_(tensor)
        opened.verify(order.location, order.version)
        return weights


def compare(model: torch.nn.Module, staged: Mapping[str, torch.Tensor], *, whole: bool) -> Live:
    """Compare every staged tensor by digest with the live tensor, as far as the layout of vLLM shows it.

    Fused parameters are cut into views of their members. Weights that are packed (by oneDNN, for example) or sharded
    are hidden: they are counted and never guessed, and only the canary checks them.
    `whole` says whether this worker holds the whole model; if not, all tensors count as hidden.
    """
    found = Live(hidden=len(staged))
    if not whole:
        return found
    with torch.no_grad():
        for name, view in visible(model, staged):
            live = digest([(name, view)])
            found.visible += 1
            found.hidden -= 1
            found.digest = (found.digest + live) & MASK
            if live != digest([(name, staged[name])]):
                found.wrong.append(name)
    return found


def visible(model: torch.nn.Module, staged: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield pairs of canonical name and live view, for the tensors whose layout is known."""
    live = dict(model.named_parameters()) | dict(model.named_buffers())
    mapping: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, tensor in staged.items():
        view = _direct(live.get(name), tensor)
        if view is None:
            view = _member(name, live, mapping, staged)
        if view is not None and view.dtype == tensor.dtype and view.shape == tensor.shape:
            yield name, view


def _direct(parameter: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a view of the parameter of that name, without padding rows; None if the parameter does not fit."""
    if parameter is None or parameter.dim() != tensor.dim() or not tensor.dim():
        return None
    return parameter.detach()[: tensor.shape[0]] if parameter.shape[0] >= tensor.shape[0] else None


def _member(
    name: str, live: Mapping[str, torch.Tensor], mapping: Mapping[str, list[str]], staged: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Return the view of a member of a fused parameter: its rows follow the rows of the members before it."""
    parts = name.split(".")
    for fused, members in mapping.items():
        for place, part in enumerate(parts):
            if part not in members or part == fused:
                continue

            def sibling(member: str, place: int = place) -> str:
                return ".".join([*parts[:place], member, *parts[place + 1 :]])

            parameter = live.get(sibling(fused))
            siblings = [staged.get(sibling(member)) for member in members]
            if parameter is None or any(one is None for one in siblings):
                continue
            rows = [len(one) for one in siblings if one is not None]
            if parameter.dim() == 0 or len(parameter) != sum(rows):
                continue
            start = sum(rows[: members.index(part)])
            return parameter.detach()[start : start + rows[members.index(part)]]
    return None

"""Saving and loading of a trainer: weights, optimizer, and the reference if no model directory holds it.

A single rank writes a whole model directory. Several ranks write their shards: a model directory without weights, which
`export.consolidate` adds, and a torch distributed checkpoint in `trainer/shards/`. The index of the shards is a pickle
written by torch. As with any torch checkpoint, read only files that you wrote.

Training continues while a checkpoint is written. Any number of ranks can read either form, and the loaded tensors are
bit for bit those that were saved.
"""

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from headrace.errors import UserError
from headrace.models.loading import load_model, named_weights
from headrace.training.checkpoints.base import (
    SHARDS,
    TrainerState,
    begin_checkpoint,
    copy_companions,
    final_path,
    finish_checkpoint,
    is_sharded,
    partial_path,
)
from headrace.training.devices import on_host
from headrace.training.lora import ADAPTER_FILE, TrainedAdapter
from headrace.training.optimizer import HalfWeights, Optimizer
from headrace.training.policies import Policies
from headrace.training.ranks import Ranks, copy_own_part, local_tensor, own_part, placed_like, whole_tensor

OPTIMIZER_FILE = Path("trainer") / "optimizer.safetensors"
REFERENCE_FILE = Path("trainer") / "reference.safetensors"
Tensors: TypeAlias = Mapping[str, torch.Tensor]
WEIGHTS, OPTIMIZER, REFERENCE = "model/", "optimizer/", "reference/"
"""The prefixes of the names of tensors in shards."""


class Saver:
    """The saver writes checkpoints of one trainer in the background, one at a time, and loads one into a new trainer.

    All ranks must make the same calls.
    """

    def __init__(
        self,
        model: Any,
        policies: Policies,
        *,
        ranks: Ranks | None,
        half: HalfWeights | None,
        adapter: TrainedAdapter | None,
    ) -> None:
        self._model = model
        self._policies = policies
        self._ranks = ranks
        self._first = ranks is None or ranks.rank == 0
        self._half = half
        self._adapter = adapter
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path] | None = None

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the live trained weights, all or the adapter's, by canonical name. The next step changes them."""
        if self._adapter is not None:
            return self._adapter.weights()
        masters = {} if self._half is None else {name: p.detach() for name, p in self._half.masters.items()}
        return named_weights(self._model) | masters

    def begin(self, directory: Path, state: TrainerState, optimizer: Optimizer, companions: Path) -> Future[Path]:
        """Start writing a checkpoint below this directory, as `Trainer.begin_save` says.

        `companions` is the model directory whose tokenizer and similar files are copied. An adapter is small, so the
        first rank writes all of it.
        """
        self._wait()
        partial = partial_path(directory, state)
        if self._first:
            begin_checkpoint(partial)
        if self._ranks is not None:
            self._ranks.meet()
        parameters = dict(self._model.named_parameters())
        # The states of this rank's optimizer, as shards of whole tensors if the parameters are sharded.
        moments = {
            key: placed_like(tensor, parameters[key.partition("/")[2]]) for key, tensor in optimizer.tensors().items()
        }
        reference = self._policies.reference
        if reference is None or state.steps_done == state.policy_steps:
            # The model directory holds the reference, unless a warm start made it.
            reference = {}
        take = self._copy_whole if self._ranks is None or self._adapter is not None else self._copy_shards
        write = take(partial, moments, reference)

        def finish() -> Path:
            write()
            if not self._first:
                return final_path(partial)
            # The source's companion files are copied after the weights: its generation config replaces the model's own.
            copy_companions(companions, partial)
            return finish_checkpoint(partial, state)

        self._last = self._thread.submit(finish)
        return self._last

    def _copy_whole(self, path: Path, moments: Tensors, reference: Tensors) -> Callable[[], None]:
        """Copy everything that a checkpoint holds, gathered from all ranks, and return the function that writes it."""
        with self._whole():
            write_weights = self._adapter.snapshot() if self._adapter else _snapshot(self._model)
        moments = on_host({key: whole_tensor(tensor) for key, tensor in moments.items()})
        reference = on_host(reference)

        def write() -> None:
            write_weights(path)
            save_file(moments, path / OPTIMIZER_FILE)
            if reference:
                save_file(reference, path / REFERENCE_FILE)

        return write if self._first else lambda: None

    def _copy_shards(self, path: Path, moments: Tensors, reference: Tensors) -> Callable[[], None]:
        """Copy this rank's shards, and return the function that waits until they are written."""
        assert self._ranks is not None
        tensors = _under(WEIGHTS, self.weights()) | _under(REFERENCE, reference) | _under(OPTIMIZER, moments)
        # On the first rank this ends when all ranks have written their shards and the index is written.
        written: Any = async_save(
            tensors,
            storage_writer=FileSystemWriter(path / SHARDS, sync_files=True),
            process_group=self._ranks.storing,
        )

        def write() -> None:
            written.result()
            if self._first:
                _write_model_files(self._model, path)

        return write

    def load(self, checkpoint: Path, state: TrainerState, optimizer: Optimizer | None) -> None:
        """Load a checkpoint with this state into the weights and the optimizer. The optimizer must be new."""
        if state.policy_steps:
            self._policies.hold_reference()
            self._load_reference(checkpoint, state)
        if is_sharded(checkpoint) and self._adapter is None:
            read_shards(checkpoint, _under(WEIGHTS, self.weights()), self._ranks)
            moments = self._sharded_moments(checkpoint) if optimizer else {}
        else:
            self._load_whole(checkpoint)
            moments = self._own_moments(checkpoint) if optimizer else {}
        if optimizer:
            optimizer.restore(moments)
        if self._half is not None:
            self._half.refresh()

    def close(self) -> None:
        """Wait until a checkpoint in progress is written. Raise the error if writing it failed. Idempotent."""
        try:
            self._wait()
        finally:
            self._thread.shutdown(wait=True)

    def _wait(self) -> None:
        """Wait until nothing is being written. Raise the error of the last checkpoint if it failed, once."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
            # Also wait for the callbacks of that checkpoint, such as pruning older ones, because pruning clears the
            # directory too.
            self._thread.submit(lambda: None).result()

    def _whole(self) -> AbstractContextManager[None]:
        return self._half.whole() if self._half else nullcontext()

    def _load_reference(self, checkpoint: Path, state: TrainerState) -> None:
        """Load the reference, if there is one, from a checkpoint that holds its weights.

        If the checkpoint does not hold them, the reference is the model directory's, which is already in place. If a
        warm start made the reference, a missing one raises a `UserError`.
        """
        reference = self._policies.reference
        if reference is None:
            return
        if is_sharded(checkpoint) and any(key.startswith(REFERENCE) for key in _saved(checkpoint)):
            read_shards(checkpoint, _under(REFERENCE, reference), self._ranks)
        elif (checkpoint / REFERENCE_FILE).is_file():
            copy_own_part(load_file(checkpoint / REFERENCE_FILE), reference)
        elif state.steps_done > state.policy_steps:
            raise UserError(
                f"[algorithm] kl: {checkpoint} does not hold the policy that its warm start made, the reference; "
                "resume as it was trained, or begin a new run with its model"
            )

    def _load_whole(self, checkpoint: Path) -> None:
        if self._adapter is not None:
            with self._whole():
                self._adapter.load(checkpoint)
            return
        if (checkpoint / ADAPTER_FILE).is_file():
            raise UserError(f"{checkpoint} holds an adapter only: it is of a run with [lora]")
        weights = self.weights()
        saved = load_model(checkpoint, dtype=str(next(iter(weights.values())).dtype).removeprefix("torch."))
        copy_own_part(named_weights(saved), weights)

    def _own_moments(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        """Return the optimizer's tensors in a file, cut to the part that this rank's optimizer steps."""
        parameters = dict(self._model.named_parameters())
        found: dict[str, torch.Tensor] = load_file(checkpoint / OPTIMIZER_FILE)
        for key, tensor in found.items():
            parameter = parameters.get(key.partition("/")[2])
            if parameter is not None and tensor.shape == parameter.shape:
                found[key] = own_part(tensor, parameter)
        return found

    def _sharded_moments(self, checkpoint: Path) -> dict[str, torch.Tensor]:
        """Return this rank's part of the optimizer's tensors in the shards, by `kind/parameter name`."""
        parameters = dict(self._model.named_parameters())
        targets: dict[str, torch.Tensor] = {}
        for key, saved in _saved(checkpoint).items():
            if not key.startswith(OPTIMIZER) or not isinstance(saved, TensorStorageMetadata):
                continue
            parameter = parameters.get(key.removeprefix(OPTIMIZER).partition("/")[2])
            if isinstance(parameter, DTensor) and saved.size == parameter.shape:
                local = parameter.to_local()
                empty = torch.zeros(local.shape, dtype=saved.properties.dtype, device=local.device)
                targets[key] = placed_like(empty, parameter)
            else:
                targets[key] = torch.zeros(saved.size, dtype=saved.properties.dtype)
        read_shards(checkpoint, targets, self._ranks)
        return {key.removeprefix(OPTIMIZER): local_tensor(tensor) for key, tensor in targets.items()}


def read_shards(checkpoint: Path, tensors: Tensors, ranks: Ranks | None) -> None:
    """Load values into these tensors, which may be sharded in another way than the checkpoint."""
    load(
        dict(tensors),
        storage_reader=FileSystemReader(checkpoint / SHARDS),
        process_group=ranks.storing if ranks else None,
        no_dist=ranks is None,
    )


def _saved(checkpoint: Path) -> dict[str, Any]:
    return FileSystemReader(checkpoint / SHARDS).read_metadata().state_dict_metadata


def _under(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _write_model_files(model: Any, path: Path) -> None:
    """Write the model's configuration files as `save_pretrained` would, without weights."""
    config = copy.deepcopy(model.config)
    # FSDP derives a class of its own from the model's class.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    if model.can_generate():
        model.generation_config.save_pretrained(path)


def _snapshot(model: Any) -> Callable[[Path], None]:
    """Copy a model's weights and configuration, and return the function that writes them as `save_pretrained` would."""
    weights = model.state_dict()
    # Tied weights are copied once and kept under all their names, which is how the writer recognises them.
    first = {_place(tensor): name for name, tensor in reversed(weights.items())}
    copies = on_host({name: weights[name] for name in first.values()})
    weights = {name: copies[first[_place(tensor)]] for name, tensor in weights.items()}
    dtype = str(model.dtype).removeprefix("torch.")
    # Writing changes the configuration, so it works on a copy. The body of the model in training is replaced for a
    # moment while a row is read, so the modules are copied too.
    model, modules = copy.copy(model), model._modules.copy()
    model.config, model._modules = copy.deepcopy(model.config), modules

    def write(path: Path) -> None:
        model.save_pretrained(path, state_dict=weights)
        # The model in training may compute in another dtype than the dtype of its weights.
        model.config.dtype = dtype
        model.config.save_pretrained(path)

    return write


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two names of the same tensor, and for nothing else that has elements."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())

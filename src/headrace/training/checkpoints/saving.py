"""Saving and loading of a trainer: weights, optimizer, and the reference if no model directory holds it.

A single rank writes a whole model directory. Several ranks write their shards. Training continues meanwhile. Any number
of ranks can read either form, and the loaded tensors are bit for bit those that were saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from headrace.delivery.parts import held_region
from headrace.errors import UserError
from headrace.models.loading import load_model, named_weights
from headrace.training.checkpoints.base import (
    TrainerState,
    begin_checkpoint,
    copy_companions,
    final_path,
    finish_checkpoint,
    is_sharded,
    partial_path,
)
from headrace.training.checkpoints.sharded import (
    OPTIMIZER,
    REFERENCE,
    WEIGHTS,
    copy_shards,
    has_reference,
    read_optimizer,
    read_shards,
    write_model_files,
)
from headrace.training.devices import on_host
from headrace.training.half import HalfWeights
from headrace.training.lora import ADAPTER_FILE, TrainedAdapter
from headrace.training.optimizer import Optimizer
from headrace.training.policies import Policies
from headrace.training.ranks.base import Ranks
from headrace.training.ranks.sharding import copy_own_part, placed_like, whole_tensor

OPTIMIZER_FILE = Path("trainer") / "optimizer.safetensors"
REFERENCE_FILE = Path("trainer") / "reference.safetensors"


def trained_weights(model: Any, half: HalfWeights | None, adapter: TrainedAdapter | None) -> dict[str, torch.Tensor]:
    """Return the trained weights by canonical name: all weights, or the adapter's weights.

    The tensors are not copies: the next step changes them.
    """
    if adapter is not None:
        return adapter.weights()
    masters = {} if half is None else {name: p.detach() for name, p in half.masters.items()}
    return named_weights(model) | masters


class Saver:
    """The saver writes checkpoints of one trainer, and loads a checkpoint into a new trainer."""

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
        self._writer = CheckpointWriter(ranks)
        self._half = half
        self._adapter = adapter

    def begin(
        self, directory: Path, state: TrainerState, optimizer: Optimizer | None, companions: Path
    ) -> Future[Path]:
        """Start writing a checkpoint below this directory. The future gives its path, once the checkpoint is complete.

        `companions` is the model directory whose tokenizer and similar files are copied. This method returns when all
        tensors are copied; they are written while the trainer continues. If an earlier checkpoint is still being
        written, this method waits for it, and raises its error if it failed. An adapter is small, so the first rank
        writes all of it.
        """
        take = self._copy_whole if self._ranks is None or self._adapter is not None else self._copy_shards
        return self._writer.save(directory, state, lambda path: take(path, state, optimizer, companions))

    def _copy_whole(
        self, path: Path, state: TrainerState, optimizer: Optimizer | None, companions: Path
    ) -> Callable[[], None]:
        """Copy everything that a checkpoint holds, and return the function that writes the copy on the first rank.

        All ranks take part: the first rank gathers the tensors.
        """
        with self._whole():
            write_weights = self._adapter.snapshot() if self._adapter else ModelSnapshot(self._model).write
        moments = on_host(self._gathered(optimizer.tensors() if optimizer else {}))
        reference = on_host(self._own_reference(state))

        def write() -> None:
            write_weights(path)
            # The source's companion files are copied after the weights: its generation config replaces the model's own.
            copy_companions(companions, path)
            save_file(moments, path / OPTIMIZER_FILE)
            if reference:
                save_file(reference, path / REFERENCE_FILE)

        return write if self._first else lambda: None

    def _copy_shards(
        self, path: Path, state: TrainerState, optimizer: Optimizer | None, companions: Path
    ) -> Callable[[], None]:
        """Copy this rank's shards, and return the function that writes them."""
        assert self._ranks is not None
        moments = optimizer.tensors() if optimizer else {}
        written = copy_shards(path, self._sharded(moments, self._own_reference(state)), self._ranks)

        def write() -> None:
            written.result()
            if self._first:
                write_model_files(self._model, path)
                copy_companions(companions, path)

        return write

    def load(self, checkpoint: Path, state: TrainerState, optimizer: Optimizer | None) -> None:
        """Load a checkpoint with this state into the weights and the optimizer. The optimizer must be new."""
        if state.policy_steps:
            self._policies.hold_reference()
            self._load_reference(checkpoint, state)
        if is_sharded(checkpoint) and self._adapter is None:
            read_shards(checkpoint, _under(WEIGHTS, self._weights()), self._ranks)
            if optimizer:
                optimizer.restore(read_optimizer(checkpoint, dict(self._model.named_parameters()), self._ranks))
        else:
            self._load_whole(checkpoint)
            if optimizer:
                optimizer.restore(self._own_part(load_file(checkpoint / OPTIMIZER_FILE)))
        if self._half is not None:
            self._half.refresh()

    def close(self) -> None:
        """Wait until a checkpoint in progress is written. Raise the error if writing it failed."""
        self._writer.close()

    def _whole(self) -> AbstractContextManager[None]:
        return self._half.whole() if self._half else nullcontext()

    def _own_reference(self, state: TrainerState) -> Mapping[str, torch.Tensor]:
        """Return the reference's weights if a warm start made them.

        Without a warm start the model directory holds them.
        """
        reference = self._policies.reference
        return reference if reference is not None and state.steps_done > state.policy_steps else {}

    def _load_reference(self, checkpoint: Path, state: TrainerState) -> None:
        """Load the reference, if there is one, from a checkpoint that holds its weights.

        If the checkpoint does not hold them, the reference is the model directory's, which is already in place. If a
        warm start made the reference, a missing one raises a `UserError`.
        """
        reference = self._policies.reference
        if reference is None:
            return
        if is_sharded(checkpoint) and has_reference(checkpoint):
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
        weights = self._weights()
        saved = load_model(checkpoint, dtype=str(next(iter(weights.values())).dtype).removeprefix("torch."))
        copy_own_part(named_weights(saved), weights)

    def _weights(self) -> dict[str, torch.Tensor]:
        return trained_weights(self._model, self._half, self._adapter)

    def _sharded(
        self, moments: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return this rank's shards of everything, by their names in a checkpoint."""
        return (
            _under(WEIGHTS, self._weights()) | _under(REFERENCE, reference) | _under(OPTIMIZER, self._placed(moments))
        )

    def _placed(self, moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the states of this rank's optimizer, by `kind/parameter name`, as shards of whole tensors."""
        parameters = dict(self._model.named_parameters())
        return {key: placed_like(tensor, parameters[key.partition("/")[2]]) for key, tensor in moments.items()}

    def _gathered(self, moments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the states of the optimizers of all ranks as whole tensors."""
        if self._ranks is None:
            return dict(moments)
        return {key: whole_tensor(tensor) for key, tensor in self._placed(moments).items()}

    def _own_part(self, moments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Cut whole tensors, by `kind/parameter name`, to the part that this rank's optimizer steps."""
        if self._ranks is None:
            return moments
        regions = {name: held_region(tensor) for name, tensor in self._model.named_parameters()}
        return {
            key: tensor[regions[name].slices] if tensor.ndim and (name := key.partition("/")[2]) in regions else tensor
            for key, tensor in moments.items()
        }


def _under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


class ModelSnapshot:
    """The weights and the configuration of a model at the moment of construction."""

    def __init__(self, model: Any) -> None:
        weights = model.state_dict()
        # Tied weights are copied once and kept under all their names, which is how the writer recognises them.
        first = {_place(tensor): name for name, tensor in reversed(weights.items())}
        copies = on_host({name: weights[name] for name in first.values()})
        self._weights = {name: copies[first[_place(tensor)]] for name, tensor in weights.items()}
        self._dtype = str(model.dtype).removeprefix("torch.")
        # Writing changes the configuration, so it works on a copy. The body of the model in training is replaced for a
        # moment while a row is read, so the modules are copied too.
        self._model = copy.copy(model)
        self._model.config = copy.deepcopy(model.config)
        self._model._modules = model._modules.copy()

    def write(self, path: Path) -> None:
        """Write the model as `save_pretrained` would have done.

        Only one call is possible: writing releases the tensors.
        """
        self._model.save_pretrained(path, state_dict=self._weights)
        # The model in training may compute in another dtype than the dtype of its weights.
        self._model.config.dtype = self._dtype
        self._model.config.save_pretrained(path)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two names of the same tensor, and for nothing else that has elements."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class CheckpointWriter:
    """The writer of checkpoints: one at a time, in the background. All ranks must make the same calls."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._first = ranks is None or ranks.rank == 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path] | None = None

    def save(self, directory: Path, state: TrainerState, copy: Callable[[Path], Callable[[], None]]) -> Future[Path]:
        """Write a checkpoint in the background. The future gives its path once the whole checkpoint is complete.

        `copy` is called with the hidden directory of the checkpoint, when no other copy exists. It copies what this
        rank writes, and returns the function that writes the copy.
        """
        self._wait()
        partial = partial_path(directory, state)
        if self._first:
            begin_checkpoint(directory, state)
        if self._ranks is not None:
            self._ranks.meet()
        self._last = self._thread.submit(self._finish, partial, state, copy(partial))
        return self._last

    def close(self) -> None:
        """Wait for the checkpoint that is being written. Raise its error if it failed. Idempotent."""
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

    def _finish(self, partial: Path, state: TrainerState, write: Callable[[], None]) -> Path:
        write()
        return finish_checkpoint(partial, state) if self._first else final_path(partial)

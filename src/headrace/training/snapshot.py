"""Snapshots for the checkpoints of a single rank: tensors as they were at one moment, in host memory of their own.

Tensors are copied while the trainer waits, and written while it trains. One checkpoint is written at a time, so there
is at most one such copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from headrace.training.checkpoint import TrainerState, write_checkpoint


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a contiguous copy of each tensor on the host."""
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in tensors.items()}


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
    """The writer of checkpoints: one at a time, in the background."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path] | None = None

    def wait(self) -> None:
        """Wait until nothing is being written. Raise the error of the last checkpoint if it failed, once."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def save(
        self, directory: Path, state: TrainerState, snapshot: Callable[[], Callable[[Path], None]]
    ) -> Future[Path]:
        """Write a checkpoint in the background. The future gives its path once it is complete.

        `snapshot` is called when no other copy exists. It copies the contents of the checkpoint and returns the
        function that writes them into a directory.
        """
        self.wait()
        # The background thread makes all files, so it finishes first what is done with the previous checkpoint, such as
        # pruning.
        self._last = self._thread.submit(write_checkpoint, directory, state, snapshot())
        return self._last

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and raise as `wait` does. Idempotent."""
        self._thread.shutdown(wait=True)
        self.wait()

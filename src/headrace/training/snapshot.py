"""What a checkpoint of one rank is written from: tensors as they were at one moment, in host memory of their own.

They are copied while the trainer waits and written while it trains on. One checkpoint is written at a time, so that
there is at most one such copy.
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
    """A copy of each, contiguous, on the host."""
    return {name: torch.empty(t.shape, dtype=t.dtype).copy_(t.detach()) for name, t in tensors.items()}


class ModelSnapshot:
    """A model's weights and configuration as they are now."""

    def __init__(self, model: Any) -> None:
        weights = model.state_dict()
        # Tied weights are copied once, under all their names: by that a writer knows them.
        first = {_place(tensor): name for name, tensor in reversed(weights.items())}
        copies = on_host({name: weights[name] for name in first.values()})
        self._weights = {name: copies[first[_place(tensor)]] for name, tensor in weights.items()}
        self._dtype = str(model.dtype).removeprefix("torch.")
        # Writing notes things in the configuration: not in that of the model in training, whose body is exchanged for
        # a moment while a row is read.
        self._model = copy.copy(model)
        self._model.config = copy.deepcopy(model.config)
        self._model._modules = model._modules.copy()

    def write(self, path: Path) -> None:
        """Write them as `save_pretrained` would have done; once only, because it lets go of what is written."""
        self._model.save_pretrained(path, state_dict=self._weights)
        # The model in training may compute in another dtype than its weights are kept in.
        self._model.config.dtype = self._dtype
        self._model.config.save_pretrained(path)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The same for two names of one tensor, and for nothing else that has elements."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class CheckpointWriter:
    """Writes one checkpoint at a time in the background."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path] | None = None

    def wait(self) -> None:
        """Until nothing is being written; raises what made the last one fail, once."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def save(
        self, directory: Path, state: TrainerState, snapshot: Callable[[], Callable[[Path], None]]
    ) -> Future[Path]:
        """Write a checkpoint in the background; the future is its path, once it is whole.

        `snapshot` copies what it holds, now that no other copy is there, and gives what fills a directory with it.
        """
        self.wait()
        # All files are made there: after whatever is done with the checkpoint before, such as pruning older ones.
        self._last = self._thread.submit(write_checkpoint, directory, state, snapshot())
        return self._last

    def close(self) -> None:
        """Wait for what is being written, and raise as `wait` does. Idempotent."""
        self._thread.shutdown(wait=True)
        self.wait()

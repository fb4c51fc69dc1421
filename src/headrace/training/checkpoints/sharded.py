"""Checkpoints of several ranks: each rank writes its own shards in the background, and any number of ranks can read.

    step-00000042/
      config.json, tokenizer.json, ...   a model directory without weights; `consolidate` adds the weights
      trainer/shards/                    a torch distributed checkpoint: weights, optimizer and, if no
                                         model directory holds it, the reference
      trainer/state.json

The directory gets its final name once all shards are on the disk. The index of the shards is a pickle written by torch.
As with any torch checkpoint, read only files that you wrote.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from headrace.models.loading import load_model, named_weights
from headrace.training.checkpoints.base import (
    SHARDS,
    TrainerState,
    begin_checkpoint,
    finish_checkpoint,
    is_sharded,
    partial_path,
)
from headrace.training.ranks.base import Ranks
from headrace.training.ranks.sharding import placed_like

WEIGHTS = "model/"
OPTIMIZER = "optimizer/"
REFERENCE = "reference/"


class ShardWriter:
    """The writer of sharded checkpoints: one at a time, in the background. All ranks must make the same calls."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path] | None = None

    def save(
        self, directory: Path, state: TrainerState, tensors: Mapping[str, torch.Tensor], fill: Callable[[Path], None]
    ) -> Future[Path]:
        """Copy the tensors now, and write them while the trainer continues.

        The future gives the path of the whole checkpoint. `fill` writes the other files of the checkpoint, on the first
        rank.
        """
        if self._last is not None:
            self._last.result()
            # Also wait for the callbacks of that checkpoint, such as pruning older ones, because pruning clears the
            # directory too.
            self._thread.submit(lambda: None).result()
        partial = partial_path(directory, state)
        if self._ranks.rank == 0:
            begin_checkpoint(directory, state)
            (partial / SHARDS).mkdir()
        self._ranks.meet()
        written: Any = async_save(
            dict(tensors),
            storage_writer=FileSystemWriter(partial / SHARDS, sync_files=True),
            process_group=self._ranks.storing,
        )
        self._last = self._thread.submit(self._finish, partial, state, written, fill)
        return self._last

    def close(self) -> None:
        """Wait for the checkpoint that is being written. Idempotent."""
        self._thread.shutdown(wait=True)

    def _finish(self, partial: Path, state: TrainerState, written: Any, fill: Callable[[Path], None]) -> Path:
        # On the first rank this returns when all ranks have written their shards and the index is written.
        written.result()
        if self._ranks.rank:
            return partial.parent / f"step-{state.steps_done:08d}"
        fill(partial)
        return finish_checkpoint(partial, state)


def read_shards(checkpoint: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks | None) -> None:
    """Load values into these tensors, which may be sharded in another way than the checkpoint."""
    load(
        dict(tensors),
        storage_reader=FileSystemReader(checkpoint / SHARDS),
        process_group=ranks.storing if ranks else None,
        no_dist=ranks is None,
    )


def has_reference(checkpoint: Path) -> bool:
    """Return whether the shards hold the weights of a reference."""
    metadata = FileSystemReader(checkpoint / SHARDS).read_metadata().state_dict_metadata
    return any(key.startswith(REFERENCE) for key in metadata)


def read_optimizer(
    checkpoint: Path, parameters: Mapping[str, torch.Tensor], ranks: Ranks | None
) -> dict[str, torch.Tensor]:
    """Return this rank's part of the optimizer's tensors, by `kind/parameter name`."""
    metadata = FileSystemReader(checkpoint / SHARDS).read_metadata().state_dict_metadata
    targets: dict[str, torch.Tensor] = {}
    for key, saved in metadata.items():
        if not key.startswith(OPTIMIZER) or not isinstance(saved, TensorStorageMetadata):
            continue
        parameter = parameters.get(key.removeprefix(OPTIMIZER).partition("/")[2])
        empty = torch.zeros(saved.size, dtype=saved.properties.dtype, device="meta")
        targets[key] = _empty_like(empty, parameter)
    read_shards(checkpoint, targets, ranks)
    return {
        key.removeprefix(OPTIMIZER): tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for key, tensor in targets.items()
    }


def write_model_files(model: Any, path: Path) -> None:
    """Write the model's configuration files as `save_pretrained` would, without weights."""
    config = copy.deepcopy(model.config)
    # FSDP derives a class of its own from the model's class.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    if model.can_generate():
        model.generation_config.save_pretrained(path)


def consolidate(checkpoint: Path, dtype: str = "float32") -> Path:
    """Add weights in safetensors to a sharded checkpoint, so that it is a complete model directory. Return its path.

    The whole model is in host memory once. If the weights are there already, nothing is done.
    """
    if not is_sharded(checkpoint) or any(checkpoint.glob("*.safetensors")):
        return checkpoint
    whole = checkpoint / ".consolidated"
    shutil.rmtree(whole, ignore_errors=True)
    write_whole(checkpoint, whole, dtype)
    # The index is moved last, so a reader sees either all weight files or no index that points to missing ones.
    for file in sorted(whole.glob("*.safetensors*"), key=lambda file: file.suffix == ".json"):
        file.rename(checkpoint / file.name)
    shutil.rmtree(whole)
    return checkpoint


def write_whole(checkpoint: Path, out: Path, dtype: str = "float32") -> None:
    """Write the model of a sharded checkpoint into a directory, as `save_pretrained` does."""
    model = load_model(checkpoint, weights="random", dtype=dtype)
    read_shards(checkpoint, {WEIGHTS + name: tensor for name, tensor in named_weights(model).items()}, None)
    model.save_pretrained(out)


def _empty_like(empty: torch.Tensor, parameter: torch.Tensor | None) -> torch.Tensor:
    if isinstance(parameter, DTensor) and empty.shape == parameter.shape and empty.ndim:
        local = parameter.to_local()
        return placed_like(torch.zeros(local.shape, dtype=empty.dtype, device=local.device), parameter)
    device = parameter.device if parameter is not None and empty.ndim else "cpu"
    return torch.zeros(empty.shape, dtype=empty.dtype, device=device)

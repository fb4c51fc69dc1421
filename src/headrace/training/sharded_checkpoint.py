"""Checkpoints of several ranks: each writes its own shards, beside training, and any number of ranks reads them.

    step-00000042/
      config.json, tokenizer.json, ...   a model directory without weights, until `consolidate` is asked for them
      trainer/shards/                    a torch distributed checkpoint: weights, optimizer and, where no
                                         model directory has it, the reference
      trainer/state.json

The directory gets its name once all shards are on the disk. The index of the shards is a pickle of torch's: like any
checkpoint of torch, read only what you wrote.
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
from headrace.training.checkpoint import (
    SHARDS,
    TrainerState,
    begin_checkpoint,
    finish_checkpoint,
    is_sharded,
    partial_path,
)
from headrace.training.ranks import Ranks
from headrace.training.sharding import placed_like

WEIGHTS = "model/"
OPTIMIZER = "optimizer/"
REFERENCE = "reference/"


class ShardWriter:
    """Writes one checkpoint at a time in the background; the same calls on all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path] | None = None

    def save(
        self, directory: Path, state: TrainerState, tensors: Mapping[str, torch.Tensor], fill: Callable[[Path], None]
    ) -> Future[Path]:
        """Copy the tensors now and write them while the trainer goes on; the future is the checkpoint, once whole.

        `fill` writes what else belongs to it, on the first rank.
        """
        if self._last is not None:
            self._last.result()
            # And for whatever is done with it, such as pruning older ones: that clears the directory too.
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
        """Wait for what is being written. Idempotent."""
        self._thread.shutdown(wait=True)

    def _finish(self, partial: Path, state: TrainerState, written: Any, fill: Callable[[Path], None]) -> Path:
        # The first rank is answered when all have written, and the index with them.
        written.result()
        if self._ranks.rank:
            return partial.parent / f"step-{state.steps_done:08d}"
        fill(partial)
        return finish_checkpoint(partial, state)


def read_shards(checkpoint: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks | None) -> None:
    """Fill these tensors, which may be sharded in another way than the checkpoint is."""
    load(
        dict(tensors),
        storage_reader=FileSystemReader(checkpoint / SHARDS),
        process_group=ranks.storing if ranks else None,
        no_dist=ranks is None,
    )


def has_reference(checkpoint: Path) -> bool:
    """Whether the shards hold the weights of a reference."""
    metadata = FileSystemReader(checkpoint / SHARDS).read_metadata().state_dict_metadata
    return any(key.startswith(REFERENCE) for key in metadata)


def read_optimizer(
    checkpoint: Path, parameters: Mapping[str, torch.Tensor], ranks: Ranks | None
) -> dict[str, torch.Tensor]:
    """This rank's part of the optimizer's tensors, by `kind/parameter name`."""
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
    """Configuration files of the model, as `save_pretrained` would write them, without its weights."""
    config = copy.deepcopy(model.config)
    # Sharding derives a class of its own from the model's.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    if model.can_generate():
        model.generation_config.save_pretrained(path)


def consolidate(checkpoint: Path, dtype: str = "float32") -> Path:
    """Give a sharded checkpoint weights in safetensors, so that it is a complete model directory; its path.

    Holds the model whole, once, in host memory. Nothing is done where the weights are there already.
    """
    if not is_sharded(checkpoint) or any(checkpoint.glob("*.safetensors")):
        return checkpoint
    whole = checkpoint / ".consolidated"
    shutil.rmtree(whole, ignore_errors=True)
    write_whole(checkpoint, whole, dtype)
    # The index comes last: a reader sees all files of the weights, or none that it would look for.
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

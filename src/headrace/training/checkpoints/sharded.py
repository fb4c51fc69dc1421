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
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from headrace.models.loading import load_model, named_weights
from headrace.training.checkpoints.base import SHARDS, is_sharded
from headrace.training.ranks.base import Ranks
from headrace.training.ranks.sharding import local_tensor, placed_like

WEIGHTS = "model/"
OPTIMIZER = "optimizer/"
REFERENCE = "reference/"


def copy_shards(path: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> Future[Any]:
    """Copy this rank's shards of these tensors now, and write them into a checkpoint while the trainer continues.

    The future ends when they are written. On the first rank it ends when all ranks have written their shards and the
    index is written.
    """
    writer = FileSystemWriter(path / SHARDS, sync_files=True)
    written: Any = async_save(dict(tensors), storage_writer=writer, process_group=ranks.storing)
    return cast("Future[Any]", written)


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
    return {key.removeprefix(OPTIMIZER): local_tensor(tensor) for key, tensor in targets.items()}


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

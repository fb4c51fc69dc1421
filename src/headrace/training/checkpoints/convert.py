"""Conversion of checkpoints of an older version, in which several ranks wrote shards with torch's pickled index.

This is the only place that reads a pickle. Its reader makes nothing but the classes of which torch's index consists,
and refuses everything else before it is called. So a prepared file cannot execute code. The shards themselves are read
by `torch.load` with `weights_only`.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoConfig

from headrace.config.model_dir import SHARDS
from headrace.errors import UserError, one_line
from headrace.models.loading import UNUSABLE
from headrace.training.checkpoints.base import (
    begin_checkpoint,
    copy_companions,
    damage_of,
    finish_checkpoint,
    partial_path,
    read_state,
    rename_aside,
)
from headrace.training.checkpoints.saving import OPTIMIZER_FILE, REFERENCE_FILE, write_model

_METADATA = "torch.distributed.checkpoint.metadata"
_INDEX = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((_METADATA, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *(
        (_METADATA, name)
        for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
    ),
}
"""Everything that torch's index of shards consists of, beside dtypes. `_get_layout` looks a name up in a table."""


def convert_checkpoint(checkpoint: Path) -> Path:
    """Write a checkpoint of shards anew, as every number of ranks writes it today. Return where the old one is kept.

    The whole model and its optimizer are in host memory once.
    """
    if damage := damage_of(checkpoint):
        raise UserError(f"{checkpoint} is damaged: {damage}")
    state = read_state(checkpoint)
    partial = partial_path(checkpoint.parent, state)
    try:
        tensors = _read(checkpoint)
        weights, moments, reference = (_under(tensors, name) for name in ("model/", "optimizer/", "reference/"))
        begin_checkpoint(partial)
        write_model(AutoConfig.from_pretrained(checkpoint), None, weights, partial)
    except (*UNUSABLE, CheckpointException) as error:
        raise UserError(f"{checkpoint} cannot be converted: {one_line(str(error), 200)}") from error
    save_file(moments, partial / OPTIMIZER_FILE)
    if reference:
        save_file(reference, partial / REFERENCE_FILE)
    copy_companions(checkpoint, partial)
    kept = rename_aside(checkpoint, "pickled")
    finish_checkpoint(partial, state)
    return kept


def _read(checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = _Reader(checkpoint / SHARDS)
    found: dict[str, torch.Tensor] = {
        key: torch.zeros(saved.size, dtype=saved.properties.dtype)
        for key, saved in reader.read_metadata().state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    load(dict(found), storage_reader=reader, no_dist=True)
    return found


def _under(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


class _Reader(FileSystemReader):
    """Torch's reader of shards, with a reader of the index that executes nothing."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            found = _Unpickler(io.BytesIO(file.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, MemoryError) as error:
            raise UserError(f"{file} is not an index of shards: {one_line(str(error), 200)}") from error
        if not isinstance(found, Metadata):
            raise UserError(f"{file} is not an index of shards")
        for place in (found.storage_data or {}).values():
            if Path(place.relative_path).name != place.relative_path:
                raise UserError(f"{file} names a file outside of its folder")
        if found.storage_meta is not None:
            found.storage_meta.load_id = self.load_id
        return found


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise UserError(
            f"the index of shards names {one_line(f'{module}.{name}', 80)}, which is no part of such an index; "
            "nothing of it was executed, and the checkpoint is left as it is"
        )

"""A safetensors file that several ranks fill together: each rank writes the regions of the tensors that it owns.

The first rank creates the file at its full size, with its header. Then every rank maps the file into memory and copies
its regions. No rank sends tensors to another one, and none holds a whole tensor. The ranks must see the same file.
"""

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from headrace.delivery.parts import Region, owned_shards
from headrace.training.devices import on_host

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Part(NamedTuple):
    """A copy of a rank's part of a tensor, and where the part lies in the whole tensor."""

    values: torch.Tensor
    region: Region


def own_parts(tensors: Mapping[str, torch.Tensor], coordinate: Mapping[str, int]) -> dict[str, Part]:
    """Copy the parts that this rank owns to the host. Of all ranks, exactly one owns an element of a tensor."""
    shards, regions = owned_shards(tensors, coordinate)
    return {name: Part(values, regions[name]) for name, values in on_host(shards).items()}


def create(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Create a file for tensors of these names, dtypes and whole shapes. Their values are not written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # The largest elements come first, so that each tensor begins at a multiple of the size of its elements.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        begin, end = end, end + math.prod(tensor.shape) * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        opened.truncate(8 + len(text) + end)
        if sys.platform == "linux":
            # A disk that is full is an error here. Later, a write into mapped memory would end the process.
            opened.flush()
            os.posix_fallocate(opened.fileno(), 0, 8 + len(text) + end)


def write_parts(file: Path, parts: Mapping[str, Part]) -> None:
    """Copy this rank's parts into a file that `create` made."""
    with file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(start - 8))
    size = file.stat().st_size
    mapped = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
    for name, part in parts.items():
        begin, end = (start + offset for offset in header[name]["data_offsets"])
        whole = mapped[begin:end].view(_DTYPES[header[name]["dtype"]]).view(header[name]["shape"])
        whole[part.region.slices].copy_(part.values)

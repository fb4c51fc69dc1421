"""Optimizer states in 8 bits on several ranks: each rank keeps the states of its own shards, in blocks of its own.

A state is one code for each element, and one scale for each block of 256 elements of the shard. Where blocks begin
depends on how parameters are cut. So a checkpoint of several ranks holds a scale for each element, and codes and scales
have the shape of their parameter. Any number of ranks can read that, and a checkpoint of one rank too.

Where all elements of a new block have one scale, codes and scales are taken as they are, bit for bit. Other blocks are
rounded once more. A state that is too small for 8 bits is kept as numbers: its scales are the numbers, and its codes
all mean 1.
"""

from collections.abc import Mapping
from typing import Any

import torch

CODES, SCALES = ".codes", ".scales"
"""The names of the tensors of a state in a checkpoint of several ranks."""
_ONE = 255
"""The code of the number 1, the largest number that has a code."""
_BLOCK_SCALE = ".scale"
_TABLE = ".qmap"


def in_blocks(state: Any) -> bool:
    """Return whether a state is torchao's state in 8 bits."""
    return hasattr(state, "block_size")


def spread(state: Any, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the codes of a state and the scale of each element. Both have the shape of the parameter `like`."""
    if not in_blocks(state):
        return {CODES: torch.full(like.shape, _ONE, dtype=torch.uint8, device=like.device), SCALES: state}
    scales = state.scale.repeat_interleave(state.block_size).view(like.shape)
    return {CODES: state.codes, SCALES: scales.to(like.dtype)}


def spread_file(saved: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint in the form of several ranks, if one rank has written them in 8 bits.

    `shapes` are the shapes of the whole parameters, by name.
    """
    found: dict[str, torch.Tensor] = {}
    for key, tensor in saved.items():
        kind, _, name = key.partition("/")
        if name not in shapes or not kind.endswith((_BLOCK_SCALE, _TABLE)):
            found[key] = tensor
        elif kind.endswith(_BLOCK_SCALE):
            scales = tensor.repeat_interleave(shapes[name].numel() // len(tensor)).view(shapes[name])
            found[f"{kind.removesuffix(_BLOCK_SCALE)}{SCALES}/{name}"] = scales
    return found


def fill(state: Any, saved: Mapping[str, torch.Tensor], *, signed: bool) -> None:
    """Set a state to what a checkpoint holds for the same elements, either codes and scales, or numbers.

    `signed` says whether the state may be negative, which decides what a code means.
    """
    if "" in saved:
        state.copy_(saved[""])
        return
    codes, scales = saved[CODES], saved[SCALES]
    if in_blocks(state):
        blocks = scales.reshape(-1, state.block_size)
        if bool((blocks == blocks[:, :1]).all()):
            state.codes.copy_(codes)
            state.scale.copy_(blocks[:, 0])
            return
    from torchao.optim.subclass_8bit import OptimState8bit  # late, because the package is an option

    meaning = OptimState8bit.zeros((256,), signed=signed).qmap
    state.copy_(meaning[codes.long()].to(scales) * scales)

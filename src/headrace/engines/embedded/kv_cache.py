"""The paged KV cache: blocks of token slots, counted references, and the tensors behind them.

A block is free exactly when nobody refers to it; every taker releases what it took, once. A free block may be
remembered for what it holds: it is taken for something else only when no other is free, least recently used first.
Only the owner of a block's last slots writes to it: sharers read the slots that were full when they joined, or copy
the block first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import torch


class BlockPool:
    """Which blocks are free, and how many refer to the others. Pure bookkeeping, no tensors."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self.on_reuse: Callable[[int], None] | None = None
        """Told of every remembered block that is taken for something else."""
        self._references = [0] * total
        # Last in, first out: a cache larger than the work touches little memory.
        self._free = list(range(total - 1, -1, -1))
        self._remembered: set[int] = set()
        # Free and remembered, the one that was free for longest first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that nobody refers to, remembered or not."""
        return len(self._free) + len(self._idle)

    def free_blocks(self) -> list[int]:
        """The blocks that nobody refers to, remembered or not, each once."""
        return [*self._free, *self._idle]

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        """How many refer to this block."""
        return self._references[block]

    def is_free(self, block: int) -> bool:
        """Whether nobody refers to this block."""
        return self._references[block] == 0

    def take(self, count: int) -> list[int]:
        """Take free blocks, remembered ones last; there must be enough of them."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks wanted, {self.free} free")
        taken = [self._free.pop() if self._free else self._reuse() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Refer once more to blocks that somebody holds, or that are remembered."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._idle:
                    raise RuntimeError(f"block {block} is free and cannot be shared")
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each block; those without any become free."""
        for block in blocks:
            if self._references[block] == 0:
                raise RuntimeError(f"block {block} is already free")
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._remembered:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def remember(self, block: int) -> None:
        """Take this block for something else only when no other is free. Somebody must hold it now."""
        if self._references[block] == 0:
            raise RuntimeError(f"block {block} is free and cannot be remembered")
        self._remembered.add(block)

    def forget(self, block: int) -> None:
        """What this block holds is of no use to anybody but its holders."""
        self._remembered.discard(block)
        if block in self._idle:
            del self._idle[block]
            self._free.append(block)

    def _reuse(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._remembered.discard(block)
        if self.on_reuse is not None:
            self.on_reuse(block)
        return block


class KVCache:
    """Keys and values by layer, `[blocks, block_size, heads, head size]`; a layer is allocated when it first writes."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the keys and values (`[T, heads, head size]`) of T tokens in these slots."""
        if layer not in self._layers:
            self._layers[layer] = (self._allocate(key), self._allocate(value))
        for store, new in zip(self._layers[layer], (key, value), strict=True):
            store.flatten(0, 1).index_copy_(0, slots, new)

    def read(self, layer: int, blocks: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values in these blocks, `[rows, tokens, heads, head size]`: each row has equally many."""
        keys, values = (store.index_select(0, blocks) for store in self._layers[layer])
        return keys.view(rows, -1, *keys.shape[2:]), values.view(rows, -1, *values.shape[2:])

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks. What is stale in a block is read, with weight 0: anything finite will do, NaN will not."""
        for stores in self._layers.values():
            for store in stores:
                store[torch.tensor(blocks, dtype=torch.long, device=store.device)] = 0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `(from, to)`, in all layers; every source is read before any target is written."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs).unbind(1)
        for stores in self._layers.values():
            for store in stores:
                store.index_copy_(0, targets.to(store.device), store.index_select(0, sources.to(store.device)))

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        shape = (self.blocks, self.block_size, *like.shape[1:])
        if like.device.type != "cpu":
            return torch.zeros(shape, dtype=like.dtype, device=like.device)
        # Zeroed, because padding is read (with weight 0); by calloc, because most of a large cache is never touched.
        zeros = torch.from_numpy(np.zeros(prod(shape) * like.element_size(), np.uint8))
        return zeros.view(like.dtype).view(shape)

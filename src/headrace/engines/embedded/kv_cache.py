"""The paged KV cache: blocks of token slots with reference counts, and the tensors that store them.

A block is free exactly when it has no references. Each reference is released exactly once. A free block may be
remembered because its content is still useful. Remembered blocks are reused only when no other block is free, the least
recently used first. Only the owner of a block's last slots writes to the block. Other sharers read only the slots that
were filled when they joined, or copy the block first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import prod

import numpy as np
import torch


class BlockPool:
    """The reference counts of all blocks and the list of free blocks. It has no tensors."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self.on_reuse: Callable[[int], None] | None = None
        """Called with every remembered block that is taken for something else."""
        self._references = [0] * total
        # Last in, first out, so that little memory is touched when the cache is larger than needed.
        self._free = list(range(total - 1, -1, -1))
        self._remembered: set[int] = set()
        # Blocks that are free and remembered. The block that has been free for longest comes first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """The number of blocks without references, remembered or not."""
        return len(self._free) + len(self._idle)

    def free_blocks(self) -> list[int]:
        """Return the blocks without references, remembered or not, each once."""
        return [*self._free, *self._idle]

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that this many tokens need."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        """Return the number of references to this block."""
        return self._references[block]

    def is_free(self, block: int) -> bool:
        """Return whether this block has no references."""
        return self._references[block] == 0

    def take(self, count: int) -> list[int]:
        """Take free blocks, remembered ones last. There must be enough free blocks."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks wanted, {self.free} free")
        taken = [self._free.pop() if self._free else self._reuse() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which must be in use or remembered."""
        for block in blocks:
            if self._references[block] == 0:
                if block not in self._idle:
                    raise RuntimeError(f"block {block} is free and cannot be shared")
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block. A block without references becomes free."""
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
        """Mark this block as useful, so that it is reused only when no other block is free. It must be in use now."""
        if self._references[block] == 0:
            raise RuntimeError(f"block {block} is free and cannot be remembered")
        self._remembered.add(block)

    def forget(self, block: int) -> None:
        """Unmark this block, because its content is useful only to its current holders."""
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
    """The keys and values of each layer, `[blocks, block_size, heads, head size]`.

    A layer is allocated at its first write.
    """

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
        """Return the keys and values in these blocks, `[rows, tokens, heads, head size]`.

        `blocks` lists the blocks of all rows in order, and each row has equally many blocks.
        """
        keys, values = (store.index_select(0, blocks) for store in self._layers[layer])
        return keys.view(rows, -1, *keys.shape[2:]), values.view(rows, -1, *values.shape[2:])

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero these blocks. Stale slots are read with weight 0, so they may hold any finite number, but not NaN."""
        for stores in self._layers.values():
            for store in stores:
                store[torch.tensor(blocks, dtype=torch.long, device=store.device)] = 0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, `(from, to)`, in all layers. Every source is read before any target is written."""
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
        # Zeroed, because padding is read with weight 0. numpy zeroes with calloc, which does not touch the memory, and
        # most of a large cache is never used.
        zeros = torch.from_numpy(np.zeros(prod(shape) * like.element_size(), np.uint8))
        return zeros.view(like.dtype).view(shape)

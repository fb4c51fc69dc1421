"""The blocks of the KV cache: their reference counts, and the prefix cache that finds blocks by their content.

A block is free exactly when it has no references. Each reference is released exactly once. A free block that the prefix
cache can find is reused only when no other block is free, the least recently used first. Sequences that share a block
are kept apart by the caller: one of them writes to the free slots of the block, and the others read only the slots that
were filled when they joined, or copy the block first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b


class Chain:
    """The keys of the full blocks of one token list under one version, by which the prefix cache finds the blocks.

    Each key is a hash of the previous key and the block's own tokens. So it stands for one version and all tokens up to
    the end of the block, and a sequence finds only blocks whose keys and values it would compute itself.
    """

    def __init__(self, version: int, block_size: int) -> None:
        self.version = version
        self._block_size = block_size
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Return the keys of at least the first `count` blocks. Between calls, `tokens` may only grow at its end."""
        keys, size = self._keys, self._block_size
        parent = keys[-1] if keys else self.version.to_bytes(8, "little", signed=True)
        while len(keys) < count:
            first = len(keys) * size
            # A hash of 16 bytes, not a cheaper one: two prefixes with the same key would silently give wrong tokens.
            content = array("i", tokens[first : first + size]).tobytes()
            parent = blake2b(parent + content, digest_size=16).digest()
            keys.append(parent)
        return keys

    def fork(self, blocks: int) -> Chain:
        """Return a chain for another token list whose first `blocks` blocks are equal."""
        other = Chain(self.version, self._block_size)
        other._keys = self._keys[:blocks]
        return other


class BlockPool:
    """The reference counts of all blocks, the free blocks, and the prefix cache, which holds no references."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
        self._references = [0] * total
        # Last in, first out, so that little memory is touched when the cache is larger than needed.
        self._free = list(range(total - 1, -1, -1))
        # The prefix cache: from key to block, and back.
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Free blocks that the prefix cache can find. The block that has been free for longest comes first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """The number of blocks without references."""
        return len(self._free) + len(self._idle)

    def free_blocks(self) -> list[int]:
        """Return the blocks without references, each once."""
        return [*self._free, *self._idle]

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that this many tokens need."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        """Return the number of references to this block."""
        return self._references[block]

    def take(self, count: int) -> list[int]:
        """Take free blocks, findable ones last. There must be enough free blocks."""
        if count > self.free:
            raise RuntimeError(f"{count} blocks wanted, {self.free} free")
        taken = []
        for _ in range(count):
            if not self._free:
                self.forget([next(iter(self._idle))])
            block = self._free.pop()
            self._references[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of these blocks, which must be in use or findable."""
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
                if block in self._keys:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def find(self, chain: Chain, tokens: Sequence[int]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of these tokens.

        The last token is never part of that prefix, because it must be computed to give the next logits.
        """
        found: list[int] = []
        for count in range(1, (len(tokens) - 1) // self.block_size + 1):
            block = self._blocks.get(chain.keys(tokens, count)[count - 1])
            if block is None:
                break
            found.append(block)
        return found

    def offer(self, key: bytes, block: int) -> None:
        """Make a full block findable. The block must be in use. If two blocks have one key, the first is found."""
        if self._references[block] == 0:
            raise RuntimeError(f"block {block} is free and cannot be offered")
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self, blocks: Iterable[int] | None = None) -> None:
        """Make these blocks (all blocks if None) unfindable, because their content is useful only to their holders."""
        for block in list(self._keys) if blocks is None else blocks:
            key = self._keys.pop(block, None)
            if key is not None:
                del self._blocks[key]
                if block in self._idle:
                    del self._idle[block]
                    self._free.append(block)

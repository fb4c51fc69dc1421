"""Full blocks of the cache, found again by what they hold: the version and all tokens up to their end.

A key stands for one version and one list of tokens, so a block is only ever found by sequences that would compute the
same keys and values. A block that nobody refers to stays findable until the pool needs it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from headrace.engines.embedded.kv_cache import BlockPool


class Chain:
    """The keys of a token list's full blocks under one version: each is a hash of the one before and its own tokens."""

    def __init__(self, version: int, block_size: int) -> None:
        self.version = version
        self._block_size = block_size
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """The keys of at least the first `count` blocks. The list may have grown since the last call, at its end."""
        keys, size = self._keys, self._block_size
        parent = keys[-1] if keys else self.version.to_bytes(8, "little", signed=True)
        while len(keys) < count:
            first = len(keys) * size
            # 16 bytes, and no cheaper hash: two different prefixes under one key would be wrong tokens, silently.
            content = array("i", tokens[first : first + size]).tobytes()
            parent = blake2b(parent + content, digest_size=16).digest()
            keys.append(parent)
        return keys

    def fork(self, blocks: int) -> Chain:
        """The chain of another list of tokens that is equal in the first blocks."""
        other = Chain(self.version, self._block_size)
        other._keys = self._keys[:blocks]
        return other


class PrefixCache:
    """Which block holds which prefix. It refers to no block: the pool tells it when one is taken for something else."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.on_reuse = self._reused

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, chain: Chain, tokens: Sequence[int]) -> list[int]:
        """Blocks with the longest known beginning of these tokens, without the last one: that one gives the logits."""
        found: list[int] = []
        for count in range(1, (len(tokens) - 1) // self._pool.block_size + 1):
            block = self._blocks.get(chain.keys(tokens, count)[count - 1])
            if block is None:
                break
            found.append(block)
        return found

    def offer(self, key: bytes, block: int) -> None:
        """This block, which somebody holds, is full. The first block with a key stays the one that is found."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key
            self._pool.remember(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks are not to be found any more."""
        for block in blocks:
            key = self._keys.pop(block, None)
            if key is not None:
                del self._blocks[key]
                self._pool.forget(block)

    def clear(self) -> None:
        """Nothing is to be found any more."""
        self.forget(list(self._keys))

    def _reused(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]

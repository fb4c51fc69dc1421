"""The prefix cache: it finds full blocks of the KV cache by the version and all tokens up to the end of the block.

A key stands for one version and one list of tokens. So a sequence finds only blocks whose keys and values it would
compute itself. A block without references can still be found until the pool needs it for something else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from headrace.engines.embedded.kv_cache import BlockPool


class Chain:
    """The keys of the full blocks of one token list under one version.

    Each key is a hash of the previous key and the block's own tokens.
    """

    def __init__(self, version: int, block_size: int) -> None:
        self.version = version
        self._block_size = block_size
        self._keys: list[bytes] = []

    def keys(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Return the keys of at least the first `count` blocks.

        Since the last call, tokens may have been added at the end of `tokens`, and nothing else may have changed.
        """
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


class PrefixCache:
    """A map from prefixes to the blocks that hold them.

    The prefix cache holds no references to blocks. The pool tells it when a block is taken for something else.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        pool.on_reuse = self._reused

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, chain: Chain, tokens: Sequence[int]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of these tokens.

        The last token is never part of that prefix, because it must be computed to give the next logits.
        """
        found: list[int] = []
        for count in range(1, (len(tokens) - 1) // self._pool.block_size + 1):
            block = self._blocks.get(chain.keys(tokens, count)[count - 1])
            if block is None:
                break
            found.append(block)
        return found

    def offer(self, key: bytes, block: int) -> None:
        """Make a full block findable. The block must be in use. If two blocks have one key, the first is found."""
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key
            self._pool.remember(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Make these blocks unfindable."""
        for block in blocks:
            key = self._keys.pop(block, None)
            if key is not None:
                del self._blocks[key]
                self._pool.forget(block)

    def clear(self) -> None:
        """Make all blocks unfindable."""
        self.forget(list(self._keys))

    def _reused(self, block: int) -> None:
        del self._blocks[self._keys.pop(block)]

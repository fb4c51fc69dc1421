"""What a sequence need not compute: the first tokens that the cache holds for it already.

Keys and values are shared only with sequences that would compute the same ones (same tokens, same version), except by
a fork, which asks for its parent's. Prompts that are kept for waiting members of a group hold references to their
blocks; the prefix cache holds none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.prefix_cache import Chain, PrefixCache
from headrace.engines.embedded.sequence import PrefixKey, Sequence
from headrace.types import NO_VERSION


@dataclass(frozen=True)
class Beginning:
    """The first tokens of a sequence, in blocks that exist; the last block may be shared in part only, by a copy."""

    blocks: list[int]
    tokens: int
    version: int
    """Under which their keys and values were begun."""
    pure: int
    """How many of them were computed under it."""
    chain: Chain | None


class Sharing:
    """Finds beginnings: in a forked request's parent, in a group, in the prefix cache."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._cache = PrefixCache(pool)
        self._version = NO_VERSION
        self._running: dict[str, Sequence] = {}
        self._groups: dict[PrefixKey, list[Sequence]] = {}
        # Prompts down to their partial block, for waiting members of a group. They outlive whoever computed them.
        self._kept: dict[PrefixKey, Beginning] = {}
        self._waiting: Counter[PrefixKey] = Counter()

    def serve(self, version: int) -> None:
        """What is computed from here on is of this version."""
        self._version = version

    def runs(self, sequence: Sequence) -> bool:
        """Whether it has a place in the cache."""
        return self._running.get(sequence.id) is sequence

    def queued(self, sequence: Sequence) -> None:
        """It waits, for what a running member of its group may have."""
        if sequence.key is not None:
            self._waiting[sequence.key] += 1

    def unqueued(self, sequence: Sequence) -> None:
        """It waits no more; what is kept for its group goes with the last one."""
        key = sequence.key
        if key is not None:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._drop(key)

    def attached(self, sequence: Sequence) -> None:
        """It has blocks now that others may share."""
        self._running[sequence.id] = sequence
        if sequence.key is not None:
            self._groups.setdefault(sequence.key, []).append(sequence)

    def detached(self, sequence: Sequence) -> None:
        """It is about to lose its blocks: what they hold is remembered."""
        self.remember(sequence)
        del self._running[sequence.id]
        if sequence.key is not None:
            members = self._groups[sequence.key]
            members.remove(sequence)
            if not members:
                del self._groups[sequence.key]

    def beginning(self, sequence: Sequence) -> Beginning | None:
        """What a waiting sequence can share now; None while a running one is just computing more of it."""
        parent, reach = self._of_parent(sequence)
        best, soon = self._of_group(sequence)
        if soon:
            reach = max(reach, sequence.prompt_length - 1)
        if best is None or best.tokens < len(sequence.tokens) - 1:
            cached = self.of_cache(sequence)
            best = cached if best is None or cached.tokens > best.tokens else best
        if parent is not None and parent.tokens >= best.tokens:
            best = parent
        return best if best.tokens >= reach else None

    def of_cache(self, sequence: Sequence) -> Beginning:
        """What the prefix cache has of its tokens, whoever computed it: full blocks, maybe none."""
        chain = self._chain(sequence)
        blocks = self._cache.find(chain, sequence.tokens)
        tokens = len(blocks) * self._pool.block_size
        return Beginning(blocks, tokens, self._version, tokens, chain)

    def remember(self, sequence: Sequence) -> None:
        """Let its full blocks be found, as far as their tokens are known and they are of the version that is served."""
        full = min(sequence.pure, len(sequence.tokens)) // self._pool.block_size
        if full > sequence.cached and sequence.kv_version == self._version:
            keys = self._chain(sequence).keys(sequence.tokens, full)
            for i in range(sequence.cached, full):
                self._cache.offer(keys[i], sequence.blocks[i])
            sequence.cached = full

    def keep_prompt(self, sequence: Sequence) -> None:
        """Hold the prompt that it has just computed, if members of its group wait."""
        key, tokens = sequence.key, sequence.prompt_length - 1
        if key is None or key in self._kept or key not in self._waiting:
            return
        if sequence.kv_version == self._version and sequence.pure >= tokens:
            self._kept[key] = self._of_sequence(sequence, tokens)
            self._pool.share(self._kept[key].blocks)

    def evict(self, but: PrefixKey | None = None) -> bool:
        """Give up the prompt that is kept for one group, if there is any."""
        for key in self._kept:
            if key != but:
                self._drop(key)
                return True
        return False

    def evictable(self) -> int:
        """Blocks that would be free if no prompt were kept."""
        held = Counter(self.kept_blocks())
        return sum(self._pool.references(block) == count for block, count in held.items())

    def kept_blocks(self) -> list[int]:
        """The blocks of prompts that are kept for waiting members of a group, one entry for each reference."""
        return [block for kept in self._kept.values() for block in kept.blocks]

    def forget(self) -> None:
        """Nothing that was computed so far is to be shared, except by forks."""
        self._version = NO_VERSION
        self._cache.clear()
        while self.evict():
            pass

    def forget_blocks(self, blocks: list[int]) -> None:
        """What these blocks hold is wrong: the prefix cache is not to find it."""
        self._cache.forget(blocks)

    def _of_parent(self, sequence: Sequence) -> tuple[Beginning | None, int]:
        """What it can take over from the request it was forked from, and how much that will be in a while."""
        parent = self._running.get(sequence.request.parent)
        if parent is None:
            return None, 0
        common = _common(parent.tokens, sequence.tokens[:-1])
        tokens = min(common, parent.computed)
        prefills = len(parent.tokens) - parent.computed > 1
        return self._of_sequence(parent, tokens) if tokens else None, common if prefills else 0

    def _of_group(self, sequence: Sequence) -> tuple[Beginning | None, bool]:
        """Its prompt, if a member of its group has computed it; and whether one is just computing it."""
        key, wanted = sequence.key, sequence.prompt_length - 1
        if key is None:
            return None, False
        if key in self._kept:
            return self._kept[key], False
        soon = False
        for other in self._groups.get(key, ()):
            if other.kv_version == self._version:
                if other.pure >= wanted:
                    return self._of_sequence(other, wanted), False
                soon |= other.pure == other.computed
        return None, soon

    def _of_sequence(self, sequence: Sequence, tokens: int) -> Beginning:
        blocks = sequence.blocks[: self._pool.blocks_for(tokens)]
        return Beginning(blocks, tokens, sequence.kv_version, min(sequence.pure, tokens), sequence.chain)

    def _chain(self, sequence: Sequence) -> Chain:
        if sequence.chain is None or sequence.chain.version != self._version:
            sequence.chain = Chain(self._version, self._pool.block_size)
        return sequence.chain

    def _drop(self, key: PrefixKey) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._pool.release(reversed(kept.blocks))


def _common(one: list[int], other: list[int]) -> int:
    """How many first tokens are equal."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])

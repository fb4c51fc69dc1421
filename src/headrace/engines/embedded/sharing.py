"""Finds the first tokens of a sequence that the KV cache already holds, so that they are not computed again.

Sequences share keys and values only if they would compute the same ones: same tokens, same version. A fork is the
exception: it takes its parent's keys and values, whatever their version. A prompt that is kept for waiting members of a
group holds references to its blocks; the prefix cache holds none.
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
    """The first tokens of a sequence, in blocks that already exist.

    If the last block is not full, a sequence does not share that block but copies it.
    """

    blocks: list[int]
    tokens: int
    version: int
    """The version under which the first keys and values were computed."""
    pure: int
    """The number of first tokens that were computed under `version`."""
    chain: Chain | None


class Sharing:
    """The three sources of a beginning: the parent of a fork, the group of a request, and the prefix cache."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._cache = PrefixCache(pool)
        self._version = NO_VERSION
        self._running: dict[str, Sequence] = {}
        self._groups: dict[PrefixKey, list[Sequence]] = {}
        # Whole prompts, including the partial block, for waiting members of a group. They are kept even when the
        # sequence that computed them has ended.
        self._kept: dict[PrefixKey, Beginning] = {}
        self._waiting: Counter[PrefixKey] = Counter()

    def serve(self, version: int) -> None:
        """Record that keys and values are computed under this version from now on."""
        self._version = version

    def runs(self, sequence: Sequence) -> bool:
        """Return whether this sequence has blocks in the KV cache."""
        return self._running.get(sequence.id) is sequence

    def queued(self, sequence: Sequence) -> None:
        """Record that this sequence waits, so that its group's prompt is kept for it."""
        if sequence.key is not None:
            self._waiting[sequence.key] += 1

    def unqueued(self, sequence: Sequence) -> None:
        """Record that this sequence no longer waits. After the group's last one, its kept prompt is dropped."""
        key = sequence.key
        if key is not None:
            self._waiting[key] -= 1
            if not self._waiting[key]:
                del self._waiting[key]
                self._drop(key)

    def attached(self, sequence: Sequence) -> None:
        """Record that this sequence now has blocks, which others may share."""
        self._running[sequence.id] = sequence
        if sequence.key is not None:
            self._groups.setdefault(sequence.key, []).append(sequence)

    def detached(self, sequence: Sequence) -> None:
        """Record that this sequence is about to lose its blocks. The prefix cache remembers the full ones."""
        self.remember(sequence)
        del self._running[sequence.id]
        if sequence.key is not None:
            members = self._groups[sequence.key]
            members.remove(sequence)
            if not members:
                del self._groups[sequence.key]

    def beginning(self, sequence: Sequence) -> Beginning | None:
        """Return what a waiting sequence can share now.

        Return None if the sequence should wait, because a running sequence is computing more of its prefix.
        """
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
        """Return the full blocks that the prefix cache has for this sequence, possibly none."""
        chain = self._chain(sequence)
        blocks = self._cache.find(chain, sequence.tokens)
        tokens = len(blocks) * self._pool.block_size
        return Beginning(blocks, tokens, self._version, tokens, chain)

    def remember(self, sequence: Sequence) -> None:
        """Offer the full blocks of this sequence to the prefix cache.

        Only blocks whose tokens are all known, and which were computed under the served version, are offered.
        """
        full = min(sequence.pure, len(sequence.tokens)) // self._pool.block_size
        if full > sequence.cached and sequence.kv_version == self._version:
            keys = self._chain(sequence).keys(sequence.tokens, full)
            for i in range(sequence.cached, full):
                self._cache.offer(keys[i], sequence.blocks[i])
            sequence.cached = full

    def keep_prompt(self, sequence: Sequence) -> None:
        """Keep the prompt that this sequence has just computed, if other members of its group wait for it."""
        key, tokens = sequence.key, sequence.prompt_length - 1
        if key is None or key in self._kept or key not in self._waiting:
            return
        if sequence.kv_version == self._version and sequence.pure >= tokens:
            self._kept[key] = self._of_sequence(sequence, tokens)
            self._pool.share(self._kept[key].blocks)

    def evict(self, but: PrefixKey | None = None) -> bool:
        """Drop the kept prompt of one group other than `but`. Return False if there is none."""
        for key in self._kept:
            if key != but:
                self._drop(key)
                return True
        return False

    def evictable(self) -> int:
        """Return the number of blocks that would become free if no prompt were kept."""
        held = Counter(self.kept_blocks())
        return sum(self._pool.references(block) == count for block, count in held.items())

    def kept_blocks(self) -> list[int]:
        """Return the blocks of the kept prompts, with one entry for each reference."""
        return [block for kept in self._kept.values() for block in kept.blocks]

    def forget(self) -> None:
        """Stop sharing everything that was computed so far, except with forks."""
        self._version = NO_VERSION
        self._cache.clear()
        while self.evict():
            pass

    def forget_blocks(self, blocks: list[int]) -> None:
        """Remove these blocks from the prefix cache, because their content is wrong."""
        self._cache.forget(blocks)

    def _of_parent(self, sequence: Sequence) -> tuple[Beginning | None, int]:
        """Return what a fork can share with its parent now, and the number of tokens that it can share later.

        The second number is 0 if the parent is not computing its prompt, because then waiting gains nothing.
        """
        parent = self._running.get(sequence.request.parent)
        if parent is None:
            return None, 0
        common = _common(parent.tokens, sequence.tokens[:-1])
        tokens = min(common, parent.computed)
        prefills = len(parent.tokens) - parent.computed > 1
        return self._of_sequence(parent, tokens) if tokens else None, common if prefills else 0

    def _of_group(self, sequence: Sequence) -> tuple[Beginning | None, bool]:
        """Return the prompt if a member of the group has computed it, and whether a member is computing it now."""
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
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])

"""Which tokens the next forward pass computes. A pure function of the submissions so far: no clock, no randomness.

The first sequence in rank order always advances: blocks are taken from the last ones, so there is no deadlock and no
starvation. A waiting sequence holds no block.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.sequence import PrefixKey, Sequence


@dataclass(frozen=True)
class Chunk:
    """Neighbouring tokens of one sequence, computed in one pass."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether its last token's logits give the sequence's next token."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass
class Plan:
    """One step: block copies first, then one forward pass over the chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    refused: list[Sequence] = field(default_factory=list)
    """Sequences that the whole cache could not hold: they are out of the scheduler."""


class Scheduler:
    """Continuous batching over a pool of blocks, with chunked prefill and preemption by recomputing."""

    def __init__(self, pool: BlockPool, *, slots: int, prefill_chunk: int) -> None:
        self.pool = pool
        self.slots = slots
        self.prefill_chunk = prefill_chunk
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        # Prompts that waiting members of a group will share. They outlive the sequence that computed them.
        self._prefixes: dict[PrefixKey, list[int]] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it starts in a later plan."""
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended, and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self.waiting.remove(sequence)
        self._drop_unwanted_prefixes()

    def plan(self, version: int) -> Plan:
        """The next pass under this version of the weights. Sequences may be admitted, preempted or refused."""
        plan = Plan()
        preempted = self._grow()
        budget = self.prefill_chunk
        for sequence in self.running:
            pending = len(sequence.tokens) - sequence.computed
            decodes = sequence.computed >= sequence.prompt_length and pending == 1
            count = 1 if decodes else min(pending, budget)
            budget -= 0 if decodes else count
            if count:
                plan.chunks.append(Chunk(sequence, sequence.computed, count))
        if not preempted:
            self._admit(plan, budget, version)
        self._drop_unwanted_prefixes()
        return plan

    def advance(self, plan: Plan, version: int) -> None:
        """The plan's pass is done: its tokens are in the cache."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.start + chunk.count
            if chunk.start < sequence.prompt_length <= sequence.computed:
                self._keep_prefix(sequence, version)

    def recompute_all(self) -> None:
        """Drop all keys and values: every running sequence starts over from its tokens, in its old rank."""
        for sequence in list(self.running):
            self._send_back(sequence)

    def forget_prefixes(self) -> None:
        """Drop every prompt that is held for waiting sequences."""
        while self._evict_prefix():
            pass

    def _grow(self) -> bool:
        """Give decoding sequences the block that their next token needs; True if somebody lost theirs for it."""
        before = self.preemptions
        for sequence in list(self.running):
            while sequence.blocks and self.pool.blocks_for(len(sequence.tokens)) > len(sequence.blocks):
                if self.pool.free:
                    sequence.blocks += self.pool.take(1)
                elif not self._evict_prefix():
                    self._send_back(self.running[-1])
                    self.preemptions += 1
        return self.preemptions > before

    def _admit(self, plan: Plan, budget: int, version: int) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self.slots or budget <= 0:
                return
            if self.pool.blocks_for(len(sequence.tokens)) > self.pool.total:
                self.waiting.remove(sequence)
                plan.refused.append(sequence)
                continue
            source, soon = self._prefix_of(sequence, version)
            if soon:
                continue
            if not self._place(sequence, source, plan):
                return
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: s.rank)
            sequence.kv_version = version
            count = min(len(sequence.tokens) - sequence.computed, budget)
            budget -= count
            plan.chunks.append(Chunk(sequence, sequence.computed, count))

    def _prefix_of(self, sequence: Sequence, version: int) -> tuple[list[int] | None, bool]:
        """Blocks that hold the sequence's prompt, if any; and whether another sequence is just computing them."""
        if sequence.key is None:
            return None, False
        if sequence.key in self._prefixes:
            return self._prefixes[sequence.key], False
        soon = False
        for other in self.running:
            if other.key == sequence.key and other.kv_version == version:
                if other.computed >= sequence.prompt_length - 1:
                    return other.blocks, False
                soon = True
        return None, soon

    def _place(self, sequence: Sequence, source: list[int] | None, plan: Plan) -> bool:
        """Take the blocks of all its tokens, sharing those of a known prompt; False if there are not enough now."""
        wanted = self.pool.blocks_for(len(sequence.tokens))
        shared_tokens = sequence.prompt_length - 1 if source is not None else 0
        full, partial = divmod(shared_tokens, self.pool.block_size)
        # One block of room, so that whoever is admitted does not at once take the block of an earlier one.
        room = 1 if self.running else 0
        while self.pool.free < wanted - full + room and self._evict_prefix(but=sequence.key):
            pass
        if self.pool.free < wanted - full + room:
            if self.running:
                return False
            # Nobody runs, so only its own prompt's partial block is in the way: compute the prompt anew.
            self.forget_prefixes()
            source, full, partial = None, 0, 0
        shared = source[:full] if source is not None else []
        self.pool.share(shared)
        sequence.blocks = shared + self.pool.take(wanted - full)
        sequence.computed = full * self.pool.block_size + partial
        if source is not None and partial:
            plan.copies.append((source[full], sequence.blocks[full]))
        return True

    def _keep_prefix(self, sequence: Sequence, version: int) -> None:
        key = sequence.key
        if key is None or key in self._prefixes or sequence.kv_version != version:
            return
        if any(other.key == key for other in self.waiting):
            blocks = sequence.blocks[: self.pool.blocks_for(sequence.prompt_length - 1)]
            self.pool.share(blocks)
            self._prefixes[key] = blocks

    def _drop_unwanted_prefixes(self) -> None:
        if self._prefixes:
            wanted = {sequence.key for sequence in self.waiting}
            for key in [key for key in self._prefixes if key not in wanted]:
                self.pool.release(self._prefixes.pop(key))

    def _evict_prefix(self, but: PrefixKey | None = None) -> bool:
        for key in self._prefixes:
            if key != but:
                self.pool.release(self._prefixes.pop(key))
                return True
        return False

    def _send_back(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self.add(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = 0

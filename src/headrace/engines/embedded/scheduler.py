"""The scheduler: it decides which tokens the next forward pass computes, and which the KV cache already holds.

Its plans follow from the submissions and results so far, without a clock or randomness. The first sequence in rank
order always advances, because blocks are taken from the last sequences; so there is no deadlock and no starvation. A
waiting sequence holds no blocks, and a sequence with tokens in flight never loses a block.

Sequences share keys and values only if they would compute the same ones: same tokens, same version. A fork is the
exception: it takes its parent's keys and values, whatever their version. A prompt that is kept for waiting members of a
group holds references to its blocks; the prefix cache holds none.
"""

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field

from headrace.engines.embedded.kv_cache import BlockPool, Chain
from headrace.engines.embedded.sequence import PrefixKey, Sequence
from headrace.types import NO_VERSION


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one sequence that are computed in one pass."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk ends with the last known token, so that its logits give the next token."""
        return self.start + self.count >= len(self.sequence.tokens)

    @property
    def decodes(self) -> bool:
        """Whether the chunk is a decode step, not prefill: only the last token, with all others in the cache."""
        return self.count == 1 and self.start > 0 and self.samples


@dataclass
class StepPlan:
    """The plan of one step: first copies of blocks, then one pass over the chunks.

    All sources of the copies are read before a target is written.
    """

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    refused: list[Sequence] = field(default_factory=list)
    """Sequences that do not fit into the whole cache. They were removed from the scheduler."""
    grown: list[Sequence] = field(default_factory=list)
    """Decoding sequences that received more blocks."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that lost their blocks and wait again."""
    upcoming: int = 0
    """The number of waiting sequences for which there are free slots. Their prompts are not computed yet."""
    ahead: int = 1
    """The number of steps, beyond those in flight, for which decoding sequences have blocks."""


@dataclass(frozen=True)
class _Beginning:
    """The first tokens of a sequence, in blocks that exist. A last block that is not full is copied, not shared."""

    blocks: list[int]
    tokens: int
    version: int
    """The version under which the first keys and values were computed."""
    pure: int
    """The number of first tokens that were computed under `version`."""
    chain: Chain | None


HELD_PLANS = 8
"""The largest number of plans for which a new sequence waits, so that more prompts are computed together."""


class Scheduler:
    """Continuous batching over a pool of blocks, with chunked prefill and preemption by recomputing.

    With `gather`, new prompts wait until there is at least one for every `gather` running sequences, so that several
    are computed together. They wait for at most `HELD_PLANS` plans.
    """

    def __init__(self, pool: BlockPool, *, slots: int, prefill_chunk: int, gather: int = 0) -> None:
        self.pool = pool
        self.slots = slots
        self.prefill_chunk = prefill_chunk
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.held: int | None = None
        """Set while new weights wait: sequences without sampled tokens, submitted as this number or later, wait too."""
        self.preemptions = 0
        self._gather = gather
        self._held_plans = 0
        self._version = NO_VERSION
        """The version whose keys and values are shared now."""
        self._groups: dict[PrefixKey, list[Sequence]] = {}
        """The running members of each group."""
        self._kept: dict[PrefixKey, _Beginning] = {}
        """Whole prompts, including the partial block, for waiting members of a group. They are kept even when the
        sequence that computed them has ended."""
        # The copies of the plan that is being made: from target block to source block.
        self._origins: dict[int, int] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. It starts in a later plan."""
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, and free its blocks."""
        if sequence.blocks:
            self._detach(sequence)
        else:
            self._unqueue(sequence)

    def shortage(self, ahead: int) -> bool:
        """Return whether `plan` with this `ahead` would have to preempt a sequence.

        The caller must then drain the runner first, and plan a single step.
        """
        # The blocks of a sequence cover its tokens in flight, so it lacks at most the blocks of `ahead` tokens.
        if len(self.running) * self.pool.blocks_for(ahead) <= self.pool.free:
            return False
        lacking = sum(count for _, count in self._lacking(ahead))
        if lacking <= self.pool.free:
            return False
        kept = Counter(self.kept_blocks())
        evictable = sum(self.pool.references(block) == count for block, count in kept.items())
        return lacking > self.pool.free + evictable

    def plan(self, version: int, ahead: int = 1) -> StepPlan:
        """Plan the next pass under this version of the weights. Sequences may be admitted, preempted or refused.

        Decoding sequences get blocks for their next `ahead` tokens beyond those in flight. If there is a `shortage`,
        `ahead` must be 1. A sequence with tokens in flight gets no chunk: the device continues it.
        """
        plan = StepPlan(ahead=ahead)
        self._version = version
        self._grow(plan)
        budget = self.prefill_chunk
        for sequence in self.running:
            if sequence.in_flight or sequence.ending is not None:
                continue
            computed = sequence.computed
            pending = len(sequence.tokens) - computed
            if pending <= 1 and computed:
                if pending:
                    plan.chunks.append(Chunk(sequence, computed, 1))
            elif budget:
                count = min(pending, budget)
                budget -= count
                plan.chunks.append(Chunk(sequence, computed, count))
        if not plan.preempted and len(self.running) < self.slots:
            self._admit(plan, budget)
        upcoming = len(self.waiting) if self.held is None else sum(self._may_begin(s) for s in self.waiting)
        plan.upcoming = min(upcoming, self.slots - len(self.running))
        return plan

    def advance(self, plan: StepPlan, version: int) -> None:
        """Record that the tokens of this plan are in the cache: its pass is done, or launched before all later ones."""
        size = self.pool.block_size
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            if not sequence.blocks or end <= sequence.computed:
                continue
            sequence.cover(end, version)
            if sequence.pure >= (sequence.cached + 1) * size:
                self._remember(sequence)
            if chunk.start < sequence.prompt_length <= end:
                self._keep_prompt(sequence)

    def recompute_all(self) -> None:
        """Drop all keys and values. Every running sequence waits again with its tokens, in its old rank."""
        self.forget_prefixes()
        for sequence in reversed(list(self.running)):
            self._send_back(sequence)

    def truncate(self, sequence: Sequence, sampled: int) -> None:
        """Drop the sampled tokens beyond the first `sampled`. They must not have been sent.

        The sequence waits again, and its other tokens are computed again.
        """
        if sequence.blocks:
            self._send_back(sequence)
        sequence.truncate(sampled)

    def forget_prefixes(self) -> None:
        """Share nothing of what was computed so far, except with forks, because the weights have changed."""
        self._version = NO_VERSION
        self.pool.forget()
        while self._evict():
            pass

    def kept_blocks(self) -> list[int]:
        """The blocks of prompts that are kept for waiting members of a group, one entry for each reference."""
        return [block for kept in self._kept.values() for block in kept.blocks]

    def _lacking(self, ahead: int) -> list[tuple[Sequence, int]]:
        """Return the decoding sequences without room for their next tokens, and how many blocks each lacks."""
        size, more = self.pool.block_size, ahead - 1
        lacking = []
        for sequence in self.running:
            if sequence.ending is not None:
                continue
            length, blocks = len(sequence.tokens), len(sequence.blocks)
            wanted = length + sequence.in_flight + more
            # A sequence whose prompt is being computed has blocks for all its tokens.
            if wanted > blocks * size and length - sequence.computed <= 1:
                count = self.pool.blocks_for(min(wanted, sequence.limit)) - blocks
                if count > 0:
                    lacking.append((sequence, count))
        return lacking

    def _grow(self, plan: StepPlan) -> None:
        """Give decoding sequences the blocks that their next tokens need. The last sequences may lose their blocks."""
        ahead = plan.ahead
        for sequence, count in self._lacking(ahead):
            while sequence.blocks and self.pool.free < count:
                if self._evict():
                    continue
                if ahead > 1:
                    raise RuntimeError(f"too few blocks for {ahead} steps: drain what is in flight, then plan one step")
                victim = self.running[-1]
                self._send_back(victim)
                self.preemptions += 1
                plan.preempted.append(victim)
            if sequence.blocks:
                sequence.blocks += self.pool.take(count)
                plan.grown.append(sequence)
        if plan.preempted:
            plan.grown = [sequence for sequence in plan.grown if sequence.blocks]

    def _may_begin(self, sequence: Sequence) -> bool:
        return self.held is None or sequence.sampled > 0 or sequence.rank[1] < self.held

    def _admit(self, plan: StepPlan, budget: int) -> None:
        self._origins.clear()
        # New prompts wait for others, so that more are computed together, unless they have waited long enough.
        coming = min(len(self.waiting), self.slots - len(self.running))
        gathered = not self._gather or coming * self._gather >= len(self.running) or self._held_plans >= HELD_PLANS
        held = 0
        self._held_plans = 0 if gathered else self._held_plans + 1
        for sequence in list(self.waiting):
            if not self._may_begin(sequence):
                continue
            if self.pool.blocks_for(len(sequence.tokens)) > self.pool.total:
                self._unqueue(sequence)
                plan.refused.append(sequence)
                continue
            beginning = self._beginning(sequence)
            if beginning is None:
                continue
            decodes = 0 < beginning.tokens == len(sequence.tokens) - 1
            if not decodes and not gathered:
                held += 1
                if len(self.running) + held >= self.slots:
                    return
                continue
            if (budget <= 0 and not decodes) or not self._place(sequence, beginning, plan):
                return
            chunk = Chunk(sequence, sequence.computed, min(len(sequence.tokens) - sequence.computed, max(budget, 1)))
            budget -= 0 if chunk.decodes else chunk.count
            plan.chunks.append(chunk)
            if len(self.running) >= self.slots:
                return

    def _place(self, sequence: Sequence, beginning: _Beginning, plan: StepPlan) -> bool:
        """Give a sequence blocks for all its tokens, and share those of its beginning.

        Return False if there are not enough blocks now.
        """
        wanted = self.pool.blocks_for(len(sequence.tokens))
        # One spare block, so that the new sequence does not at once take the block of an earlier one.
        room = 1 if self.running else 0
        while not self._fits(beginning, wanted + room):
            if self._evict(but=sequence.key):
                continue
            if self.running:
                return False
            # Nothing is running, so only the partial block of its own kept prompt is in the way: drop that too.
            self._evict()
            beginning = self._of_cache(sequence)
        # Add room for the steps right after the prompt, if no other sequence needs these blocks.
        later = self.pool.blocks_for(min(len(sequence.tokens) + plan.ahead - 1, sequence.limit))
        if self._fits(beginning, later + 2 * len(self.running)):
            wanted = max(wanted, later)
        full, partial = divmod(beginning.tokens, self.pool.block_size)
        shared = beginning.blocks[:full]
        self.pool.share(shared)
        sequence.blocks = shared + self.pool.take(wanted - full)
        sequence.computed, sequence.pure, sequence.kv_version = beginning.tokens, beginning.pure, beginning.version
        if beginning.chain is not None and beginning.chain is not sequence.chain:
            sequence.chain = beginning.chain.fork(full)
        if partial:
            # The source may itself be the target of a copy in this plan. It is still empty then, so copy its source.
            source = self._origins.get(beginning.blocks[full], beginning.blocks[full])
            self._origins[sequence.blocks[full]] = source
            plan.copies.append((source, sequence.blocks[full]))
        self._unqueue(sequence)
        insort(self.running, sequence, key=lambda s: s.rank)
        if sequence.key is not None:
            self._groups.setdefault(sequence.key, []).append(sequence)
        return True

    def _fits(self, beginning: _Beginning, wanted: int) -> bool:
        full = beginning.tokens // self.pool.block_size
        idle = sum(self.pool.references(block) == 0 for block in beginning.blocks[:full])
        return self.pool.free - idle >= wanted - full

    def _unqueue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        if sequence.key in self._kept and all(other.key != sequence.key for other in self.waiting):
            self._drop(sequence.key)

    def _detach(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._remember(sequence)
        if sequence.key is not None:
            members = self._groups[sequence.key]
            members.remove(sequence)
            if not members:
                del self._groups[sequence.key]
        # The last blocks are released first, because they are then reused first. A prefix is useful without the blocks
        # that follow it, but not the other way round.
        self.pool.release(reversed(sequence.blocks))
        sequence.leave()

    def _send_back(self, sequence: Sequence) -> None:
        if sequence.in_flight:
            raise RuntimeError(f"sequence {sequence.id} is sent back with {sequence.in_flight} tokens in flight")
        self._detach(sequence)
        self.add(sequence)

    def _beginning(self, sequence: Sequence) -> _Beginning | None:
        """Return what a waiting sequence can share now.

        Return None if the sequence should wait, because a running sequence is computing more of its prefix.
        """
        parent, reach = self._of_parent(sequence)
        best, soon = self._of_group(sequence)
        if soon:
            reach = max(reach, sequence.prompt_length - 1)
        if best is None or best.tokens < len(sequence.tokens) - 1:
            cached = self._of_cache(sequence)
            best = cached if best is None or cached.tokens > best.tokens else best
        if parent is not None and parent.tokens >= best.tokens:
            best = parent
        return best if best.tokens >= reach else None

    def _of_cache(self, sequence: Sequence) -> _Beginning:
        """Return the full blocks that the prefix cache has for this sequence, possibly none."""
        chain = self._chain(sequence)
        blocks = self.pool.find(chain, sequence.tokens)
        tokens = len(blocks) * self.pool.block_size
        return _Beginning(blocks, tokens, self._version, tokens, chain)

    def _remember(self, sequence: Sequence) -> None:
        """Offer to the prefix cache the full blocks whose tokens are known and computed under the served version."""
        full = min(sequence.pure, len(sequence.tokens)) // self.pool.block_size
        if full > sequence.cached and sequence.kv_version == self._version:
            keys = self._chain(sequence).keys(sequence.tokens, full)
            for i in range(sequence.cached, full):
                self.pool.offer(keys[i], sequence.blocks[i])
            sequence.cached = full

    def _keep_prompt(self, sequence: Sequence) -> None:
        """Keep the prompt that this sequence has just computed, if other members of its group wait for it."""
        key, tokens = sequence.key, sequence.prompt_length - 1
        if key is None or key in self._kept or all(other.key != key for other in self.waiting):
            return
        if sequence.kv_version == self._version and sequence.pure >= tokens:
            self._kept[key] = self._of_sequence(sequence, tokens)
            self.pool.share(self._kept[key].blocks)

    def _evict(self, but: PrefixKey | None = None) -> bool:
        """Drop the kept prompt of one group other than `but`. Return False if there is none."""
        for key in self._kept:
            if key != but:
                self._drop(key)
                return True
        return False

    def _of_parent(self, sequence: Sequence) -> tuple[_Beginning | None, int]:
        """Return what a fork can share with its parent now, and the number of tokens that it can share later.

        The second number is 0 if the parent is not computing its prompt, because then waiting gains nothing.
        """
        wanted = sequence.request.parent
        parent = next((other for other in self.running if other.id == wanted), None) if wanted else None
        if parent is None:
            return None, 0
        common = _common(parent.tokens, sequence.tokens[:-1])
        tokens = min(common, parent.computed)
        prefills = len(parent.tokens) - parent.computed > 1
        return self._of_sequence(parent, tokens) if tokens else None, common if prefills else 0

    def _of_group(self, sequence: Sequence) -> tuple[_Beginning | None, bool]:
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

    def _of_sequence(self, sequence: Sequence, tokens: int) -> _Beginning:
        blocks = sequence.blocks[: self.pool.blocks_for(tokens)]
        return _Beginning(blocks, tokens, sequence.kv_version, min(sequence.pure, tokens), sequence.chain)

    def _chain(self, sequence: Sequence) -> Chain:
        if sequence.chain is None or sequence.chain.version != self._version:
            sequence.chain = Chain(self._version, self.pool.block_size)
        return sequence.chain

    def _drop(self, key: PrefixKey) -> None:
        self.pool.release(reversed(self._kept.pop(key).blocks))


def _common(one: list[int], other: list[int]) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(i for i in range(length) if one[i] != other[i])

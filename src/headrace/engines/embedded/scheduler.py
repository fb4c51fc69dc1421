"""Which tokens the next forward pass computes. A pure function of the submissions so far: no clock, no randomness.

The first sequence in rank order always advances: blocks are taken from the last ones, so there is no deadlock and no
starvation. A waiting sequence holds no block, and a sequence with tokens in flight never loses one.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.sequence import Sequence
from headrace.engines.embedded.sharing import Beginning, Sharing


@dataclass(slots=True)
class Chunk:
    """Neighbouring tokens of one sequence, computed in one pass."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether its last token's logits give the sequence's next token."""
        return self.start + self.count >= len(self.sequence.tokens)

    @property
    def decodes(self) -> bool:
        """Whether it is the one token that follows what the cache holds: no prefill."""
        return self.count == 1 and self.start > 0 and self.samples


@dataclass
class StepPlan:
    """One step: block copies first (all sources are read before a target is written), then one pass over the chunks."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    refused: list[Sequence] = field(default_factory=list)
    """Sequences that the whole cache could not hold: they are out of the scheduler."""
    grown: list[Sequence] = field(default_factory=list)
    """Decoding sequences that got more blocks."""
    preempted: list[Sequence] = field(default_factory=list)
    """Sequences that lost their blocks, and wait again."""
    upcoming: int = 0
    """Sequences that could run beside these and still wait for their prompts to be computed."""
    ahead: int = 1
    """Steps that decoding sequences have blocks for, beyond those in flight."""


HELD_PLANS = 8
"""Plans that a sequence waits for company, at most."""


class Scheduler:
    """Continuous batching over a pool of blocks, with chunked prefill and preemption by recomputing.

    With `gather`, prompts are computed together, one for every so many sequences that run; fewer wait for others, a few
    plans long.
    """

    def __init__(
        self, pool: BlockPool, *, slots: int, prefill_chunk: int, max_length: int | None = None, gather: int = 0
    ) -> None:
        self.pool = pool
        self.slots = slots
        self.prefill_chunk = prefill_chunk
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.admits_new = True
        """Whether sequences that have no token yet may begin."""
        self._ahead = 1
        self.preemptions = 0
        self._gather = gather
        self._held_plans = 0
        self._max_length = max_length
        self._sharing = Sharing(pool)
        # Blocks that the copies of the plan in the making will fill, and from where.
        self._origins: dict[int, int] = {}

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it starts in a later plan."""
        if self._max_length is not None:
            sequence.limit = min(sequence.limit, self._max_length)
        insort(self.waiting, sequence, key=lambda s: s.rank)
        self._sharing.queued(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended, and free its blocks."""
        if self._sharing.runs(sequence):
            self._sharing.remember(sequence)
            self._detach(sequence)
        else:
            self._unqueue(sequence)

    def shortage(self, ahead: int) -> bool:
        """Whether `plan` with this `ahead` would have to preempt somebody: drain first, then plan one step."""
        # What a sequence has covers what is under way: it lacks the blocks of `ahead` tokens at most.
        if len(self.running) * self.pool.blocks_for(ahead) <= self.pool.free:
            return False
        lacking = sum(count for _, count in self._lacking(ahead))
        return lacking > self.pool.free and lacking > self.pool.free + self._sharing.evictable()

    def plan(self, version: int, ahead: int = 1) -> StepPlan:
        """The next pass under this version of the weights. Sequences may be admitted, preempted or refused.

        Decoding sequences get blocks for their next `ahead` tokens, beyond those in flight; `ahead` over 1 is our
        error while there is a `shortage`. One with tokens in flight goes on by itself, and has no chunk.
        """
        plan = StepPlan(ahead=ahead)
        self._ahead = ahead
        self._sharing.serve(version)
        self._grow(plan, ahead)
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
        upcoming = len(self.waiting) if self.admits_new else sum(s.sampled > 0 for s in self.waiting)
        plan.upcoming = min(upcoming, self.slots - len(self.running))
        return plan

    def advance(self, plan: StepPlan, version: int) -> None:
        """The plan's pass is done, or launched ahead of all later ones: its tokens are in the cache."""
        size = self.pool.block_size
        for chunk in plan.chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.count
            if not sequence.blocks or end <= sequence.computed:
                continue
            sequence.cover(end, version)
            if sequence.pure >= (sequence.cached + 1) * size:
                self._sharing.remember(sequence)
            if chunk.start < sequence.prompt_length <= end:
                self._sharing.keep_prompt(sequence)

    def recompute_all(self) -> None:
        """Drop all keys and values: every running sequence starts over from its tokens, in its old rank."""
        self.forget_prefixes()
        for sequence in reversed(list(self.running)):
            self._send_back(sequence)

    def truncate(self, sequence: Sequence, sampled: int) -> None:
        """Drop its sampled tokens beyond this many, none of which was sent; it starts over from the others."""
        if self._sharing.runs(sequence):
            self._send_back(sequence)
        sequence.truncate(sampled)

    def forget_prefixes(self) -> None:
        """The weights have changed: drop what is held for waiting or future sequences."""
        self._sharing.forget()

    def forget_blocks(self, blocks: list[int]) -> None:
        """What these blocks hold is wrong: no future sequence is to find it."""
        self._sharing.forget_blocks(blocks)

    def kept_blocks(self) -> list[int]:
        """The blocks of prompts that are kept for waiting members of a group, one entry for each reference."""
        return self._sharing.kept_blocks()

    def _lacking(self, ahead: int) -> list[tuple[Sequence, int]]:
        """Decoding sequences without room for their next tokens, and how many blocks they lack."""
        size, more = self.pool.block_size, ahead - 1
        lacking = []
        for sequence in self.running:
            if sequence.ending is not None:
                continue
            length, blocks = len(sequence.tokens), len(sequence.blocks)
            wanted = length + sequence.in_flight + more
            # A sequence in its prefill has blocks for all its tokens.
            if wanted > blocks * size and length - sequence.computed <= 1:
                count = self.pool.blocks_for(min(wanted, sequence.limit)) - blocks
                if count > 0:
                    lacking.append((sequence, count))
        return lacking

    def _grow(self, plan: StepPlan, ahead: int) -> None:
        """Give decoding sequences the blocks that their next tokens need; the last ones may lose theirs for it."""
        for sequence, count in self._lacking(ahead):
            while sequence.blocks and self.pool.free < count:
                if self._sharing.evict():
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

    def _gathered(self) -> bool:
        """Whether the prompts that wait are worth a pass, or have waited for long enough."""
        coming = min(len(self.waiting), self.slots - len(self.running))
        return not self._gather or coming * self._gather >= len(self.running) or self._held_plans >= HELD_PLANS

    def _admit(self, plan: StepPlan, budget: int) -> None:
        self._origins.clear()
        gathered, held = self._gathered(), 0
        self._held_plans = 0 if gathered else self._held_plans + 1
        for sequence in list(self.waiting):
            if not self.admits_new and not sequence.sampled:
                continue
            if self.pool.blocks_for(len(sequence.tokens)) > self.pool.total:
                self._unqueue(sequence)
                plan.refused.append(sequence)
                continue
            beginning = self._sharing.beginning(sequence)
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

    def _place(self, sequence: Sequence, beginning: Beginning, plan: StepPlan) -> bool:
        """Give it blocks for all its tokens, sharing those of its beginning; False if there are not enough now."""
        wanted = self.pool.blocks_for(len(sequence.tokens))
        # One block of room, so that whoever is admitted does not at once take the block of an earlier one.
        room = 1 if self.running else 0
        while not self._fits(beginning, wanted + room):
            if self._sharing.evict(but=sequence.key):
                continue
            if self.running:
                return False
            # Nobody runs, so only its own prompt's partial block is in the way: go without it.
            self._sharing.evict()
            beginning = self._sharing.of_cache(sequence)
        # Room for the steps that follow its prompt at once, if that takes nothing from anybody.
        later = self.pool.blocks_for(min(len(sequence.tokens) + self._ahead - 1, sequence.limit))
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
            # The block may itself be a copy of this plan: then it is empty until the copies are made.
            source = self._origins.get(beginning.blocks[full], beginning.blocks[full])
            self._origins[sequence.blocks[full]] = source
            plan.copies.append((source, sequence.blocks[full]))
        self._unqueue(sequence)
        insort(self.running, sequence, key=lambda s: s.rank)
        self._sharing.attached(sequence)
        return True

    def _fits(self, beginning: Beginning, wanted: int) -> bool:
        full = beginning.tokens // self.pool.block_size
        idle = sum(self.pool.is_free(block) for block in beginning.blocks[:full])
        return self.pool.free - idle >= wanted - full

    def _unqueue(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._sharing.unqueued(sequence)

    def _detach(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._sharing.detached(sequence)
        # From its end: what is released first is reused first, and a prefix is of use without what follows it.
        self.pool.release(reversed(sequence.blocks))
        sequence.leave()

    def _send_back(self, sequence: Sequence) -> None:
        if sequence.in_flight:
            raise RuntimeError(f"sequence {sequence.id} is sent back with {sequence.in_flight} tokens in flight")
        self._detach(sequence)
        self.add(sequence)

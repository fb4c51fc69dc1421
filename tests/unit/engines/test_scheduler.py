"""The scheduler alone: a stand-in for the model appends a token wherever the plan samples one."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.scheduler import HELD_PLANS, Chunk, Scheduler, StepPlan
from headrace.engines.embedded.sequence import Sampled, Sequence


class Harness:
    """A cache that holds, in each slot, which tokens it stands for and the version that computed it."""

    def __init__(
        self,
        *,
        blocks: int = 16,
        block_size: int = 4,
        slots: int = 4,
        chunk: int = 8,
        gather: int = 0,
    ) -> None:
        self.pool = BlockPool(blocks, block_size)
        self.scheduler = Scheduler(self.pool, slots=slots, prefill_chunk=chunk, gather=gather)
        self.order = 0
        self.log: list[Any] = []
        self.slots: dict[int, list[Any]] = {block: [None] * block_size for block in range(blocks)}
        self.flying: dict[str, list[tuple[int, int]]] = {}
        """Tokens and versions that the host does not know yet."""

    def submit(
        self,
        name: str,
        prompt: int | list[int],
        max_tokens: int,
        group: str = "",
        priority: int = 0,
        parent: str = "",
    ) -> Sequence:
        request = Request(
            id=name,
            token_ids=np.arange(prompt, dtype=np.int32) if isinstance(prompt, int) else np.array(prompt, np.int32),
            sampling=Sampling(max_tokens=max_tokens),
            group=group,
            priority=priority,
            parent=parent,
        )
        sequence = Sequence(request, self.order)
        self.order += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, version: int = 0) -> StepPlan:
        plan = self.launch(version)
        self.land()
        return plan

    def launch(self, version: int = 0, ahead: int = 1) -> StepPlan:
        """Run a plan as a device would: what it samples is in flight until `land`."""
        before = set(self.scheduler.running)
        plan = self.scheduler.plan(version, ahead)
        self.check(plan)
        self.log.append([(c.sequence.id, c.start, c.count) for c in plan.chunks])
        read = [list(self.slots[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, read, strict=True):
            self.slots[target] = content
        # Whoever has tokens in flight goes on without being told.
        going_on = [Chunk(s, s.computed, 1) for s in self.scheduler.running if s.in_flight]
        for chunk in plan.chunks + going_on:
            # Whoever was just admitted has blocks for its known tokens only.
            steps = ahead if chunk.decodes and chunk.sequence in before else 1
            for _ in range(steps):
                self.compute(chunk, version)
        self.scheduler.advance(plan, version)
        return plan

    def compute(self, chunk: Chunk, version: int) -> None:
        sequence = chunk.sequence
        flying = self.flying.setdefault(sequence.id, [])
        tokens = sequence.tokens + [token for token, _ in flying]
        if len(tokens) >= sequence.limit:
            return
        first, count = (len(tokens) - 1, 1) if flying else (chunk.start, chunk.count)
        for position in range(first, first + count):
            block, offset = divmod(position, self.pool.block_size)
            self.slots[sequence.blocks[block]][offset] = (tuple(tokens[: position + 1]), version)
        if first + count == len(tokens):
            flying.append(((sequence.rank[1] * 31 + len(tokens)) % 11, version))
            sequence.in_flight += 1

    def land(self, only: str | None = None) -> None:
        for sequence in list(self.scheduler.running):
            if only in (None, sequence.id):
                landed = self.flying.pop(sequence.id, [])
                sequence.in_flight -= len(landed)
                new = Sampled(sequence, [t for t, _ in landed], [0.0] * len(landed), [v for _, v in landed])
                sequence.extend(new)
                if len(sequence.tokens) >= sequence.limit:
                    self.scheduler.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        self.flying.pop(sequence.id, None)
        self.scheduler.remove(sequence)

    def check(self, plan: StepPlan) -> None:
        """What a sequence counts as computed is in its blocks (after the copies); no block is lost; the limits hold."""
        size = self.pool.block_size
        origins = {target: source for source, target in plan.copies}
        for sequence in self.scheduler.running:
            for position in range(min(sequence.computed, len(sequence.tokens))):
                block = sequence.blocks[position // size]
                tokens, under = self.slots[origins.get(block, block)][position % size]
                assert tokens == tuple(sequence.tokens[: position + 1])
                assert under == sequence.kv_version or position >= sequence.pure
            assert sequence.pure <= sequence.computed
        assert sum(c.count for c in plan.chunks if not c.decodes) <= self.scheduler.prefill_chunk
        assert len(self.scheduler.running) <= self.scheduler.slots
        assert all(not s.blocks and s.computed == 0 for s in self.scheduler.waiting)
        for chunk in plan.chunks:
            assert chunk.start == chunk.sequence.computed and chunk.count > 0
        held = Counter(block for s in self.scheduler.running for block in s.blocks)
        held.update(self.scheduler.kept_blocks())
        assert all(self.pool.references(block) == held[block] for block in range(self.pool.total))
        assert self.pool.free == self.pool.total - len(held)

    def finish(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.scheduler.waiting and not self.scheduler.running:
                assert self.pool.free == self.pool.total
                return
            self.step()
        raise AssertionError("no end: deadlock or livelock")


def test_prompts_are_cut_to_the_budget_beside_decodes() -> None:
    h = Harness(chunk=8)
    h.submit("a", 5, 9)
    h.submit("b", 13, 9)
    h.step()
    h.step()
    h.step()
    assert h.log == [
        [("a", 0, 5), ("b", 0, 3)],
        [("a", 5, 1), ("b", 3, 8)],
        [("a", 6, 1), ("b", 11, 2)],
    ]


def test_priority_first_then_order_of_submission() -> None:
    h = Harness(slots=1, blocks=64)
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        h.submit(name, 3, 1, priority=priority)
    h.finish()
    assert [name for step in h.log for name, _, _ in step] == ["b", "d", "a", "c"]


def test_followers_share_full_blocks_and_copy_the_partial_one() -> None:
    h = Harness(block_size=4, chunk=64)
    leader = h.submit("a", 11, 5, group="g")
    followers = [h.submit(name, 11, 5, group="g") for name in "bc"]
    stranger = h.submit("d", 10, 5, group="g")
    h.step()
    assert h.log[0] == [("a", 0, 11), ("d", 0, 10)]
    plan = h.step()
    assert h.log[1] == [("a", 11, 1), ("d", 10, 1), ("b", 10, 1), ("c", 10, 1)]
    for follower in followers:
        assert follower.blocks[:2] == leader.blocks[:2]
        assert (leader.blocks[2], follower.blocks[2]) in plan.copies
    assert not set(stranger.blocks) & set(leader.blocks)
    h.finish()


def test_a_follower_takes_over_when_the_leader_is_gone() -> None:
    h = Harness(chunk=4)
    leader = h.submit("a", 11, 5, group="g")
    h.submit("b", 11, 5, group="g")
    h.step()
    h.step()
    h.scheduler.remove(leader)
    h.step()
    assert h.log[2] == [("b", 8, 3)], "its full blocks are still there"
    h.finish()


def test_a_prompt_outlives_the_leader_that_ends_with_its_first_token() -> None:
    h = Harness(slots=1)
    h.submit("a", 7, 1, group="g")
    h.submit("b", 7, 1, group="g")
    h.submit("c", 7, 1, group="g")
    h.finish()
    assert h.log == [[("a", 0, 7)], [("b", 6, 1)], [("c", 6, 1)]]
    assert h.pool.free == h.pool.total


def test_a_prompt_of_another_version_is_not_shared() -> None:
    h = Harness(slots=2)
    h.submit("a", 7, 9, group="g")
    h.step(version=0)
    h.submit("b", 7, 9, group="g")
    h.step(version=1)
    assert h.log[1] == [("a", 7, 1), ("b", 0, 7)]


def test_a_prompt_begun_under_an_older_version_is_not_kept_for_others() -> None:
    h = Harness(slots=1, chunk=4)
    h.submit("a", 7, 1, group="g")
    h.submit("b", 7, 1, group="g")
    for version in (0, 1, 1, 1):
        h.step(version)
    assert h.log == [[("a", 0, 4)], [("a", 4, 3)], [("b", 0, 4)], [("b", 4, 3)]]


def test_the_newest_gives_way_and_comes_back_in_its_old_place() -> None:
    h = Harness(blocks=5, block_size=4, slots=3, chunk=64)
    first = h.submit("a", 7, 8)
    second = h.submit("b", 7, 8)
    for _ in range(3):
        h.step()
    assert h.scheduler.preemptions == 1
    assert h.scheduler.running == [first] and h.scheduler.waiting == [second]
    assert second.sampled == 2
    h.finish()
    assert first.sampled == second.sampled == 8


def test_a_sequence_that_never_fits_is_refused_alone() -> None:
    h = Harness(blocks=2, block_size=4)
    big = h.submit("big", 9, 1)
    small = h.submit("small", 3, 2)
    plan = h.step()
    assert plan.refused == [big]
    h.finish()
    assert small.sampled == 2


def test_any_request_shares_what_another_has_computed() -> None:
    h = Harness(block_size=4, chunk=64)
    first = h.submit("a", 11, 3)
    h.finish()
    assert first.tokens[:11] == list(range(11))
    h.submit("same", 11, 1)
    h.submit("longer", [*first.tokens, 5, 6], 1)
    h.submit("shorter", 8, 1)
    h.submit("other", [0, 1, 2, 9, 4, 5, 6, 7, 8], 1)
    h.step()
    assert h.log[-1] == [("same", 8, 3), ("longer", 12, 4), ("shorter", 4, 4), ("other", 0, 9)]
    h.finish()


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    h = Harness(blocks=5, block_size=4, slots=3, chunk=64)
    first = h.submit("a", list(range(7)), 8)
    second = h.submit("b", list(range(20, 27)), 8)
    for _ in range(3):
        h.step()
    assert second in h.scheduler.waiting
    h.remove(first)
    h.step()
    assert h.log[-1] == [("b", 8, 1)], "eight of its nine tokens were computed, and nobody needed the blocks"


def test_blocks_of_mixed_versions_are_not_found() -> None:
    h = Harness(block_size=4, chunk=64)
    first = h.submit("a", 6, 20)
    for version in (0, 0, 0):
        h.step(version)
    for _ in range(6):
        h.step(1)
    assert (first.kv_version, first.computed, first.pure) == (0, 14, 8)
    h.submit("b", first.tokens[:-1], 1)
    h.step(1)
    assert h.log[-1][-1] == ("b", 0, 14)


def test_new_weights_make_all_that_is_cached_unreachable() -> None:
    h = Harness(chunk=64)
    h.submit("a", 9, 1)
    h.finish()
    h.submit("b", 9, 1)
    h.step()
    assert h.log[-1] == [("b", 8, 1)], "two blocks are found"
    h.scheduler.forget_prefixes()
    h.submit("c", 9, 1)
    h.step()
    assert h.log[-1] == [("c", 0, 9)], "nothing is found, even under the same version"
    h.scheduler.forget_prefixes()
    h.submit("d", 9, 1)
    h.step(1)
    assert h.log[-1] == [("d", 0, 9)]


def test_what_is_wrong_is_not_found() -> None:
    h = Harness(chunk=64)
    broken = h.submit("a", 9, 9)
    h.step()
    blocks = list(broken.blocks)
    h.remove(broken)
    h.pool.forget(blocks)
    h.submit("b", 9, 1)
    h.step()
    assert h.log[-1] == [("b", 0, 9)]


def test_a_copy_of_this_plan_is_not_the_source_of_another() -> None:
    h = Harness(block_size=4, chunk=64, slots=4)
    first = h.submit("a", 7, 9)
    h.step()
    h.submit("b", 7, 9, parent="a")
    h.submit("c", 7, 9, parent="b")
    plan = h.step()
    assert h.log[-1] == [("a", 7, 1), ("b", 6, 1), ("c", 6, 1)]
    assert [source for source, _ in plan.copies] == [first.blocks[1]] * 2
    h.finish()


# Forks


def test_a_fork_shares_its_parents_tokens_and_costs_no_prefill() -> None:
    h = Harness(block_size=4, chunk=4, slots=4)
    parent = h.submit("p", 6, 20)
    for _ in range(6):
        h.step()
    parent_blocks = list(parent.blocks)
    long = h.submit("long", list(range(100, 112)), 1)
    whole = h.submit("whole", list(parent.tokens), 3, parent="p")
    pivot = h.submit("pivot", parent.tokens[:7], 3, parent="p")
    plan = h.step()
    assert h.log[-1] == [("p", 10, 1), ("long", 0, 4), ("whole", 10, 1), ("pivot", 6, 1)], "long takes all the budget"
    assert whole.blocks[:2] == parent_blocks[:2] and pivot.blocks[:1] == parent_blocks[:1]
    assert plan.copies == [(parent_blocks[2], whole.blocks[2]), (parent_blocks[1], pivot.blocks[1])]
    assert long.computed == 4
    h.finish()


def test_a_fork_shares_as_far_as_the_tokens_agree() -> None:
    h = Harness(block_size=4, chunk=64)
    parent = h.submit("p", 9, 20)
    h.step()
    child = h.submit("c", [0, 1, 2, 3, 4, 50, 51], 2, parent="p")
    h.step()
    assert h.log[-1] == [("p", 9, 1), ("c", 5, 2)]
    assert child.blocks[0] == parent.blocks[0]
    h.finish()


def test_a_fork_takes_over_keys_of_any_version() -> None:
    h = Harness(block_size=4, chunk=64)
    parent = h.submit("p", 6, 20)
    h.step(0)
    h.step(0)
    h.step(1)
    h.step(1)
    assert parent.pure == 7
    child = h.submit("c", list(parent.tokens), 9, parent="p")
    h.step(1)
    assert h.log[-1] == [("p", 9, 1), ("c", 9, 1)]
    assert (child.kv_version, child.pure) == (0, 7)
    young = h.submit("y", parent.tokens[:6], 9, parent="p")
    h.step(1)
    assert (young.kv_version, young.computed, young.pure) == (0, 6, 5), "its own pass was under another version"


def test_a_fork_waits_for_a_parent_that_is_computed_again() -> None:
    h = Harness(block_size=4, chunk=4)
    parent = h.submit("p", 7, 20)
    for _ in range(4):
        h.step()
    h.scheduler.recompute_all()
    h.submit("c", list(parent.tokens), 2, parent="p")
    for _ in range(4):
        h.step()
    assert h.log[-4:] == [[("p", 0, 4)], [("p", 4, 4)], [("p", 8, 2)], [("p", 10, 1), ("c", 9, 1)]]


def test_forks_of_a_parent_that_is_gone_compute_their_prompt_once() -> None:
    h = Harness(block_size=4, chunk=64)
    parent = h.submit("p", 6, 20)
    for _ in range(4):
        h.step()
    tokens = list(parent.tokens)
    h.remove(parent)
    h.scheduler.forget_prefixes()
    for k in range(2):
        h.submit(f"c{k}", tokens, 2, group="p/fork", parent="p")
    h.step(1)
    h.step(1)
    assert h.log[-2:] == [[("c0", 0, 10)], [("c0", 10, 1), ("c1", 9, 1)]]


# Steps in flight


def test_blocks_are_given_ahead_up_to_the_limit() -> None:
    h = Harness(block_size=4, chunk=64)
    long = h.submit("long", 4, 9)
    short = h.submit("short", list(range(50, 54)), 5)
    h.launch()
    h.land()
    plan = h.launch(ahead=8)
    assert [len(long.blocks), len(short.blocks)] == [3, 3]
    assert plan.grown == [long, short]
    assert (long.in_flight, short.in_flight) == (8, 4)
    plan = h.launch(ahead=8)
    assert [c.sequence.id for c in plan.chunks] == [], "all that they may sample is in flight"
    assert [len(long.blocks), len(short.blocks), plan.grown] == [4, 3, [long]]
    h.land()
    assert (len(long.tokens), len(short.tokens)) == (13, 9)
    assert h.pool.free == h.pool.total


def test_one_step_ahead_is_the_plain_plan() -> None:
    h = Harness(block_size=4, chunk=64)
    a = h.submit("a", 4, 9)
    h.launch()
    assert a.in_flight == 1 and len(a.blocks) == 1
    plan = h.launch()
    assert plan.grown == [a] and len(a.blocks) == 2 and a.in_flight == 2
    h.land()
    assert a.tokens == [0, 1, 2, 3, 4, 5] and a.computed == 5 and a.pure == 5


def test_a_shortage_is_seen_before_anybody_loses_blocks() -> None:
    h = Harness(blocks=5, block_size=4, chunk=64)
    h.submit("a", list(range(7)), 30)
    h.submit("b", list(range(20, 27)), 30)
    h.step()
    assert not h.scheduler.shortage(1)
    assert h.scheduler.shortage(2)
    with pytest.raises(RuntimeError, match="drain"):
        h.scheduler.plan(0, ahead=2)
    assert h.scheduler.preemptions == 0


def test_prompts_kept_for_waiting_members_are_no_shortage() -> None:
    h = Harness(blocks=6, block_size=4, chunk=64, slots=1)
    h.submit("a", 7, 30, group="g")
    h.submit("b", 7, 30, group="g")
    h.step()
    assert h.pool.free == 4
    assert not h.scheduler.shortage(17) and not h.scheduler.shortage(13)
    assert h.scheduler.shortage(18)
    h.launch(ahead=17)
    h.land()


def test_a_sequence_with_tokens_in_flight_is_not_sent_back() -> None:
    h = Harness(blocks=5, block_size=4, chunk=64)
    a = h.submit("a", list(range(7)), 30)
    b = h.submit("b", list(range(20, 27)), 30)
    h.launch()
    h.launch()
    with pytest.raises(RuntimeError, match="in flight"):
        h.scheduler.plan(0)
    with pytest.raises(RuntimeError, match="in flight"):
        h.scheduler.recompute_all()
    with pytest.raises(RuntimeError, match="in flight"):
        h.scheduler.truncate(b, 0)
    h.land()
    plan = h.launch()
    assert plan.preempted == [b] and h.scheduler.running == [a]


def test_a_truncated_sequence_starts_over_and_leaves_what_others_share_alone() -> None:
    h = Harness(block_size=4, chunk=64)
    a = h.submit("a", 6, 30)
    for _ in range(4):
        h.step()
    tokens = list(a.tokens)
    h.submit("c", tokens, 4, parent="a")
    h.step()
    h.scheduler.truncate(a, 1)
    assert a.tokens == tokens[:7] and a.sampled == 1
    h.step(1)
    assert h.log[-1][0][0] == "c"
    h.finish()


def decoding(count: int, slots: int, gather: int) -> Harness:
    """So many that decode, with room for others."""
    h = Harness(blocks=64, slots=slots, chunk=64, gather=gather)
    for i in range(count):
        h.submit(f"{i}", 3, 60)
    h.step()
    assert len(h.scheduler.running) == count
    return h


def prompts(plan: StepPlan) -> list[str]:
    return [chunk.sequence.id for chunk in plan.chunks if chunk.count > 1]


def test_few_prompts_wait_for_others_but_not_for_long() -> None:
    h = decoding(8, slots=12, gather=4)
    h.submit("late", [5, 6, 7, 8], 9)
    assert [prompts(h.step()) for _ in range(HELD_PLANS + 1)] == [[]] * HELD_PLANS + [["late"]]


def test_prompts_begin_together_once_they_are_enough() -> None:
    h = decoding(8, slots=12, gather=4)
    h.submit("first", [5, 6, 7, 8], 9)
    assert prompts(h.step()) == []
    h.submit("second", [8, 7, 6, 5], 9)
    assert prompts(h.step()) == ["first", "second"]


def test_nobody_waits_for_company_where_few_run() -> None:
    h = decoding(3, slots=12, gather=4)
    h.submit("late", [5, 6, 7, 8], 9)
    assert prompts(h.step()) == ["late"]


def test_whoever_needs_no_prompt_computed_does_not_wait_for_those_who_do() -> None:
    h = decoding(8, slots=12, gather=2)
    parent = h.scheduler.running[0]
    h.submit("late", [5, 6, 7, 8], 9)
    h.submit("fork", parent.tokens, 9, parent=parent.id)
    assert "fork" in [c.sequence.id for c in h.step().chunks]
    assert [s.id for s in h.scheduler.waiting] == ["late"]


def test_a_plan_without_changes_is_cheap() -> None:
    h = Harness(blocks=1024 * 8, block_size=16, slots=1024, chunk=1024 * 20)
    for i in range(1024):
        h.submit(f"{i}", [i % 7] * 17, 60)
    h.scheduler.advance(h.scheduler.plan(0), 0)
    for sequence in h.scheduler.running:
        sequence.extend(Sampled(sequence, [1], [0.0], [0]))
    h.submit("waits", 20, 9)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        plan = h.scheduler.plan(0)
        seconds.append(time.perf_counter() - started)
        assert len(plan.chunks) == 1024
    assert min(seconds) < 2e-3


REQUESTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.sampled_from(["", "g", "h"]), st.integers(0, 1)),
    min_size=1,
    max_size=10,
)


@settings(max_examples=150, deadline=None)
@given(
    requests=REQUESTS,
    blocks=st.integers(8, 20),
    slots=st.integers(1, 5),
    chunk=st.integers(1, 30),
    abort_every=st.integers(2, 9),
    swap_every=st.integers(3, 20),
    fork_every=st.integers(2, 9),
    keep=st.booleans(),
    ahead=st.integers(1, 5),
    gather=st.integers(0, 2),
)
def test_every_schedule_ends_without_leaks_and_repeats(
    requests: list[tuple[int, int, str, int]],
    blocks: int,
    slots: int,
    chunk: int,
    abort_every: int,
    swap_every: int,
    fork_every: int,
    keep: bool,
    ahead: int,
    gather: int,
) -> None:
    logs = []
    for _ in range(2):
        h = Harness(blocks=blocks, block_size=4, slots=slots, chunk=chunk, gather=gather)
        sequences = [h.submit(f"{i}", *r[:2], group=r[2], priority=r[3]) for i, r in enumerate(requests)]
        version = 0
        for i in range(30):
            running = h.scheduler.running
            if running and i % abort_every == 0:
                h.remove(running[i % len(running)])
            if running and i % fork_every == 0 and len(sequences) < 15:
                parent = running[i % len(running)]
                at = 1 + i % len(parent.tokens)
                child = h.submit(f"{parent.id}.{i}", parent.tokens[:at], 3, parent=parent.id)
                sequences.append(child)
            if i % swap_every == 0:
                version += 1
                h.scheduler.forget_prefixes()
                if not keep:
                    h.land()
                    h.scheduler.recompute_all()
            if h.scheduler.shortage(ahead):
                h.land()
                h.launch(version)
            else:
                h.launch(version, ahead)
            if i % 3 == 0:
                h.land()
        h.land()
        h.finish()
        assert all(s.computed == 0 for s in sequences)
        logs.append(h.log)
    assert logs[0] == logs[1]

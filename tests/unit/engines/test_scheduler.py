"""The scheduler alone: a stand-in for the model appends a token wherever the plan samples one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.kv_cache import BlockPool
from headrace.engines.embedded.scheduler import Plan, Scheduler
from headrace.engines.embedded.sequence import Sequence


class Harness:
    def __init__(self, *, blocks: int = 16, block_size: int = 4, slots: int = 4, chunk: int = 8) -> None:
        self.pool = BlockPool(blocks, block_size)
        self.scheduler = Scheduler(self.pool, slots=slots, prefill_chunk=chunk)
        self.order = 0
        self.log: list[Any] = []

    def submit(self, name: str, prompt: int, max_tokens: int, group: str = "", priority: int = 0) -> Sequence:
        request = Request(
            id=name,
            token_ids=np.arange(prompt, dtype=np.int32),
            sampling=Sampling(max_tokens=max_tokens),
            group=group,
            priority=priority,
        )
        sequence = Sequence(request, self.order)
        self.order += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, version: int = 0) -> Plan:
        plan = self.scheduler.plan(version)
        self.check(plan)
        sampled = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        self.log.append([(c.sequence.id, c.start, c.count) for c in plan.chunks])
        self.scheduler.advance(plan, version)
        for sequence in sampled:
            sequence.append(0, 0.0, version)
            if sequence.sampled == sequence.sampling.max_tokens:
                self.scheduler.remove(sequence)
        return plan

    def check(self, plan: Plan) -> None:
        """No write to a block that somebody else may read there; every chunk has room; the limits hold."""
        size = self.pool.block_size
        writers: dict[tuple[int, int], str] = {}
        prefill = 0
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert chunk.start == sequence.computed and chunk.count > 0
            for position in range(chunk.start, chunk.start + chunk.count):
                slot = (sequence.blocks[position // size], position % size)
                assert writers.setdefault(slot, sequence.id) == sequence.id
            prefill += chunk.count if chunk.start < sequence.prompt_length or chunk.count > 1 else 0
        assert prefill <= self.scheduler.prefill_chunk
        assert len(self.scheduler.running) <= self.scheduler.slots
        for other in self.scheduler.running:
            for position in range(other.computed):
                slot = (other.blocks[position // size], position % size)
                assert writers.get(slot, other.id) == other.id, "a computed slot is written by another"
        assert all(not s.blocks and s.computed == 0 for s in self.scheduler.waiting)

    def finish(self, limit: int = 500) -> None:
        for _ in range(limit):
            if not self.scheduler.waiting and not self.scheduler.running:
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
    assert h.pool.free == h.pool.total


def test_a_follower_takes_over_when_the_leader_is_gone() -> None:
    h = Harness(chunk=4)
    leader = h.submit("a", 11, 5, group="g")
    h.submit("b", 11, 5, group="g")
    h.step()
    h.step()
    h.scheduler.remove(leader)
    h.step()
    assert h.log[2] == [("b", 0, 4)]
    h.finish()
    assert h.pool.free == h.pool.total


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
)
def test_every_schedule_ends_without_leaks_and_repeats(
    requests: list[tuple[int, int, str, int]], blocks: int, slots: int, chunk: int, abort_every: int, swap_every: int
) -> None:
    logs = []
    for _ in range(2):
        h = Harness(blocks=blocks, block_size=4, slots=slots, chunk=chunk)
        sequences = [h.submit(f"{i}", *r[:2], group=r[2], priority=r[3]) for i, r in enumerate(requests)]
        for i in range(40):
            if h.scheduler.running and i % abort_every == 0:
                h.scheduler.remove(h.scheduler.running[i % len(h.scheduler.running)])
            if i % swap_every == 0:
                h.scheduler.forget_prefixes()
                h.scheduler.recompute_all()
            h.step()
        h.finish()
        assert h.pool.free == h.pool.total
        assert all(s.computed == 0 for s in sequences)
        logs.append(h.log)
    assert logs[0] == logs[1]

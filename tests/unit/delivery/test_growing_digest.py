import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delivery import digest as digest_module
from headrace.delivery.digest import GrowingDigest, digest
from headrace.delivery.digest_sums import BLOCK, DigestPiece, layout_of
from headrace.delivery.plan import PackingPlan, make_plan, unpack

SHAPES = {
    "a.odd": ("bfloat16", (3, 5)),
    "b.empty": ("float32", (0,)),
    "c.large": ("float32", (5 * BLOCK + 7,)),
    "d.bytes": ("int8", (4 * BLOCK + 1,)),
    "e.scalar": ("float32", ()),
    "f.blocks": ("bfloat16", (8, BLOCK)),
}


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("headrace.delivery.digest_sums.SPAN", 2 * BLOCK)
    layout_of.cache_clear()
    yield
    layout_of.cache_clear()


def packed(seed: int) -> tuple[PackingPlan, torch.Tensor]:
    plan = make_plan((name, dtype, shape) for name, (dtype, shape) in SHAPES.items())
    generator = torch.Generator().manual_seed(seed)
    return plan, torch.randint(0, 256, (plan.nbytes,), generator=generator, dtype=torch.uint8)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0, 1), max_size=12), st.integers(0, 99))
def test_what_arrives_piece_by_piece_has_the_digest_of_the_whole(cuts: list[float], seed: int):
    plan, sent = packed(seed)
    wanted = digest(unpack(sent, plan.entries).items())
    # What is not here yet is noise, which must not be read.
    buffer = torch.full_like(sent, 0xA5)
    views = unpack(buffer, plan.entries)
    with closing(GrowingDigest(plan.entries)) as growing:
        assert not growing.begun
        done = 0
        for stop in sorted({int(cut * plan.nbytes) for cut in cuts} | {plan.nbytes}):
            buffer[done:stop] = sent[done:stop]
            done = stop
            growing.grown(views, stop)
        assert growing.value() == wanted


def test_a_byte_that_came_wrong_shows():
    plan, sent = packed(0)
    wanted = digest(unpack(sent, plan.entries).items())
    for entry in (entry for entry in plan.entries if entry.nbytes):
        for place in (entry.offset, entry.offset + entry.nbytes - 1):
            wrong = sent.clone()
            wrong[place] ^= 1
            with closing(GrowingDigest(plan.entries)) as growing:
                growing.grown(unpack(wrong, plan.entries), plan.nbytes)
                assert growing.value() != wanted, entry.name


def test_one_that_is_given_up_ends_its_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(digest_module, "threads_here", lambda: 3)
    plan, sent = packed(0)
    before = set(threading.enumerate())
    begun, go_on = threading.Barrier(4), threading.Event()

    def summed(piece: DigestPiece) -> torch.Tensor:
        if not go_on.is_set():
            begun.wait(60)
            go_on.wait(10)
        return torch.zeros(1)

    monkeypatch.setattr(DigestPiece, "sums", summed)
    growing = GrowingDigest(plan.entries)
    growing.grown(unpack(sent, plan.entries), plan.nbytes)
    begun.wait(60)  # All three are at work at once.
    working = set(threading.enumerate()) - before
    assert len(working) == 3
    go_on.set()
    growing.close()
    growing.close()
    assert not any(thread.is_alive() for thread in working)

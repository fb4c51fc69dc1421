"""Bands of decoding rows: the cheapest cut there is."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from headrace.engines.embedded.runner import bands


def total(cut: list[tuple[int, int]], widths: list[int], cost: float) -> float:
    """Padded widths of all rows, and the cost of every band."""
    return sum(cost + (end - first) * max(widths[first:end]) for first, end in cut)


@given(st.lists(st.integers(1, 20), max_size=8), st.sampled_from([0.5, 4.0, 16.0]))
def test_no_other_cut_is_cheaper(lengths: list[int], cost: float) -> None:
    widths = sorted(lengths)
    cut = bands(widths, cost)
    assert [row for first, end in cut for row in range(first, end)] == list(range(len(widths)))
    inner = range(1, len(widths))
    others = [
        list(zip((0, *places), (*places, len(widths)), strict=True))
        for count in range(len(widths))
        for places in combinations(inner, count)
    ]
    assert total(cut, widths, cost) == min((total(other, widths, cost) for other in others), default=0)


def test_one_long_row_does_not_pad_the_others() -> None:
    assert bands([4] * 31 + [20], 16.0) == [(0, 31), (31, 32)]
    assert bands([4, 4, 5, 5], 16.0) == [(0, 4)]
    assert bands([], 16.0) == []

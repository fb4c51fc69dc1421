from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.algorithms.assemble import overlong, shaped


def test_overlong_by_hand():
    lengths = np.array([0, 60, 80, 81, 90, 100, 130], np.int32)
    found = overlong(lengths, max_tokens=100, buffer=20)
    assert found.tolist() == pytest.approx([0, 0, 0, 0.05, 0.5, 1, 1])
    assert not overlong(lengths, max_tokens=100, buffer=0).any()
    assert overlong(lengths, max_tokens=100, buffer=100)[1] == pytest.approx(0.6)


def test_shaped_by_hand():
    rewards, lengths = np.array([1.0, 1.0, 0.0]), np.array([50, 90, 100], np.int32)
    assert shaped(rewards, lengths, max_tokens=100).tolist() == [1, 1, 0]
    found = shaped(rewards, lengths, max_tokens=100, overlong_buffer=20, overlong_penalty=2.0)
    assert found.tolist() == pytest.approx([1, 0, -2])
    assert shaped(rewards, lengths, max_tokens=100, length_penalty=0.5).tolist() == pytest.approx([0.75, 0.55, -0.5])
    both = shaped(rewards, lengths, max_tokens=100, overlong_buffer=20, length_penalty=0.5)
    assert both.tolist() == pytest.approx([0.75, 0.05, -1.5])


@given(st.integers(0, 200), st.integers(0, 200), st.integers(1, 128), st.floats(0, 3), st.floats(0, 3))
def test_longer_never_earns_more(first, second, buffer, penalty, slope):
    lengths = np.array(sorted([first, second]), np.int32)
    options = {"overlong_buffer": buffer, "overlong_penalty": penalty, "length_penalty": slope}
    short, long = shaped(np.ones(2), lengths, max_tokens=128, **options)
    assert 1 >= short >= long

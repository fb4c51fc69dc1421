from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.tasks.source import PromptSource, permutation
from headrace.types import Prompt

SEEDS = st.integers(0, 2**64 - 1)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(id=str(i), text=f"prompt {i}") for i in range(count)]


def draw(source: PromptSource, count: int) -> list[str]:
    return [source.draw().id for _ in range(count)]


@given(SEEDS, st.integers(1, 40), st.integers(1, 4))
def test_every_epoch_holds_every_prompt_once(seed: int, size: int, epochs: int) -> None:
    source = PromptSource(prompts(size), seed)
    for _ in range(epochs):
        assert Counter(draw(source, size)) == Counter(str(i) for i in range(size))


@given(SEEDS, st.integers(1, 30), st.integers(0, 100), st.integers(1, 60))
def test_seek_goes_on_where_another_run_stood(seed: int, size: int, position: int, more: int) -> None:
    uninterrupted = PromptSource(prompts(size), seed)
    draw(uninterrupted, position)
    assert uninterrupted.position == position
    resumed = PromptSource(prompts(size), seed)
    resumed.position = position
    assert draw(resumed, more) == draw(uninterrupted, more)
    assert resumed.position == position + more


def test_the_order_is_pinned() -> None:
    """A run that is resumed by a later release must find the same order: these values may never change."""
    source = PromptSource(prompts(8), seed=7)
    assert "".join(draw(source, 16)) == "5327601472604135"


def test_epochs_and_seeds_differ_and_mix_well() -> None:
    orders = [tuple(permutation(seed, epoch, 50)) for seed in range(20) for epoch in range(20)]
    assert len(set(orders)) == 400
    # Over many epochs a prompt is at every place equally often: mean 24.5, standard error 0.25.
    places = np.stack([np.argsort(permutation(3, epoch, 50)) for epoch in range(3300)])
    assert np.abs(places.mean(axis=0) - 24.5).max() < 1.25


def test_far_positions_cost_one_permutation() -> None:
    source = PromptSource(prompts(5), seed=1)
    source.position = 5 * 10**15 + 2
    assert source.draw().id == str(permutation(1, 10**15, 5)[2])


def test_a_prompt_that_is_left_out_is_drawn_no_more_and_the_others_keep_their_places() -> None:
    prompts = [Prompt(id=str(i), text="x") for i in range(5)]
    whole, source = PromptSource(prompts, seed=3), PromptSource(prompts, seed=3)
    source.leave_out("2")
    expected = [prompt.id for prompt in (whole.draw() for _ in range(20)) if prompt.id != "2"]
    assert [source.draw().id for _ in expected] == expected
    for id in "013":
        source.leave_out(id)
    assert source.draw().id == "4"
    with pytest.raises(DataError, match="every training prompt is too long"):
        source.leave_out("4")


def test_nothing_to_draw_from() -> None:
    with pytest.raises(DataError, match="no training prompts"):
        PromptSource([], seed=0)

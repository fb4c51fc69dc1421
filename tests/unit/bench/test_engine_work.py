"""The engine benchmark's options and the requests that follow from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.bench.engine import drawn_before_tail
from headrace.bench.engine_rounds import make_work
from headrace.bench.options import EngineBench, check_options
from headrace.bench.workload import draw_lengths
from headrace.errors import UserError


def options(**changes: Any) -> EngineBench:
    return EngineBench(**{"model": "m", "batch": 4, "prompt": 5, "generate": 20, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batch": 0}, "--batch 0"),
        ({"prompt": -3}, "--prompt -3"),
        ({"generate": 0}, "--generate 0"),
        ({"requests": -1}, "--requests -1"),
        ({"top_p": 0.0}, "--top-p 0"),
        ({"rescore": 1.5}, "--rescore 1.5"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"device": "tpu"}, "--device tpu"),
        ({"peers": ("vllm",)}, "--peer vllm"),
        ({"peers": ("generate",), "temperature": 0.0}, "--peer"),
        ({"tail": "8"}, "--tail 8: must be ROWS:LENGTH"),
        ({"tail": "4:90"}, "--tail 4:90"),
        ({"tail": "1:20"}, "longer than --generate 20"),
        ({"tail": "1:90", "lengths": "lognormal:9:20"}, "--tail and --lengths"),
        ({"fork": "2:x"}, "--fork 2:x: must be N:AT"),
        ({"fork": "2:5"}, "after the prompt of 5"),
        ({"lengths": "normal:9:20"}, "lognormal:MEAN:CUT"),
        ({"lengths": "lognormal:9"}, "lognormal:MEAN:CUT"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        check_options(options(**changes))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"batch": 1}, {"batch": 0}),
        ({"requests": 0}, {"requests": -1}),
        ({"top_p": 1.0}, {"top_p": 1.01}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"rescore": 0.0}, {"rescore": -0.01}),
        ({"rescore": 1.0}, {"rescore": 1.01}),
        ({"temperature": 0.0}, {"temperature": -0.1}),
        ({"swap_every": 0.0}, {"swap_every": -0.1}),
        ({"peers": ("generate", "transformers")}, {"peers": ("generate", "vllm")}),
        ({"tail": "3:21"}, {"tail": "3:20"}),
        ({"tail": "3:21"}, {"tail": "4:21"}),
        ({"tail": "3:21", "requests": 4}, {"tail": "3:21", "requests": 5}),
        ({"fork": "2:6"}, {"fork": "2:5"}),
        ({"lengths": "lognormal:1:1"}, {"lengths": "lognormal:0:1"}),
    ],
)
def test_the_last_good_value_of_an_option_passes_and_the_next_does_not(
    good: dict[str, Any], bad: dict[str, Any]
) -> None:
    check_options(options(**good))
    with pytest.raises(UserError):
        check_options(options(**bad))


def test_options_that_pass_together_make_the_requests_that_they_describe() -> None:
    together = options(requests=9, lengths="lognormal:9:20", fork="2:6", peers=("generate",), group_size=2, seed=3)
    check_options(together)
    work = make_work(together, 50)
    assert work.lengths == draw_lengths(9, 9, 20, 3).tolist() and len(set(work.lengths)) > 1
    assert work.fork == (2, 6) and work.tail_rows == 0
    requests = work.requests("round")
    assert [len(request.token_ids) for request in requests] == [5] * 9
    assert [request.sampling.max_tokens for request in requests] == work.lengths
    assert [request.group for request in requests] == [f"round/group-{i // 2}" for i in range(9)]
    assert len({request.sampling.seed for request in requests}) == 9


@given(count=st.integers(1, 50), mean=st.integers(1, 200), cut=st.integers(1, 300), seed=st.integers(0, 9))
def test_drawn_lengths_keep_their_bounds_and_their_seed(count: int, mean: int, cut: int, seed: int) -> None:
    drawn = draw_lengths(count, mean, cut, seed)
    assert drawn.shape == (count,) and drawn.min() >= 1 and drawn.max() <= cut
    np.testing.assert_array_equal(drawn, draw_lengths(count, mean, cut, seed))


def test_drawn_lengths_are_lognormal_with_the_mean_that_was_asked_for() -> None:
    drawn = draw_lengths(200_000, 64, 10**9, 0)
    assert drawn.mean() == pytest.approx(64, rel=0.01)
    assert np.median(drawn) == pytest.approx(64 * math.exp(-(0.8**2) / 2), rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.02)


def test_the_tail_is_the_last_rows() -> None:
    work = make_work(options(tail="1:90"), 50)
    assert work.lengths == [20, 20, 20, 90] and work.tail_rows == 1 and work.tokens == 150


def test_before_the_tail_the_others_have_ended_and_the_tail_has_the_rest() -> None:
    assert drawn_before_tail([20, 20, 90, 90], 2, 80) == [20, 20, 20, 20]
    assert drawn_before_tail([20, 20, 90, 90], 2, 86) == [20, 20, 23, 23], "a launch ends a few steps later"
    assert drawn_before_tail([20, 20, 90, 90], 2, 87) == [20, 20, 23, 23]
    assert drawn_before_tail([20, 90], 1, 39) == [20, 19], "its prompt was computed one step later"


def test_requests_are_those_of_the_options() -> None:
    work = make_work(options(requests=6, temperature=0.5, top_k=3, top_p=0.9), 50)
    made = work.requests("r")
    assert len({request.id for request in made}) == len({request.sampling.seed for request in made}) == 6
    for request in made:
        assert len(request.token_ids) == 5 and request.token_ids.max() < 50
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (20, 0.5, 3, 0.9)


def test_requests_of_one_prompt_are_a_group() -> None:
    alone = make_work(options(requests=4), 50).requests("r")
    assert {request.group for request in alone} == {""}
    made = make_work(options(requests=6, group_size=3), 50)
    for requests in (made.requests("r"), made.warm_up().requests("r")):
        assert [request.group for request in requests] == ["r/group-0"] * 3 + ["r/group-1"] * 3
        for first in (0, 3):
            prompts = {request.token_ids.tobytes() for request in requests[first : first + 3]}
            assert len(prompts) == 1


def test_the_warm_up_ends_in_the_same_order() -> None:
    work = make_work(options(requests=40, lengths="lognormal:60:256"), 50)
    warm = work.warm_up()
    assert max(warm.lengths) == 64 and min(warm.lengths) >= 1
    by_length = np.argsort(work.lengths, kind="stable")
    assert (np.diff(np.array(warm.lengths)[by_length]) >= 0).all()

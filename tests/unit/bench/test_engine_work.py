"""The engine benchmark's options and the requests that follow from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from headrace.bench.engine import drawn_before_tail
from headrace.bench.engine_rounds import lengths_of, make_requests, other_round
from headrace.bench.options import EngineBench
from headrace.bench.workload import draw_lengths
from headrace.cli.main import app
from headrace.errors import UserError


def options(**changes: Any) -> EngineBench:
    return EngineBench(**{"model": "m", "batch": 4, "prompt": 5, "generate": 20, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"top_p": 0.0}, "--top-p 0"),
        ({"peer": "generate", "temperature": 0.0}, "--peer"),
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
        options(**changes).check()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
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
    options(**good).check()
    with pytest.raises(UserError):
        options(**bad).check()


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("batch", "1", "0"),
        ("requests", "0", "-1"),
        ("top-p", "1.0", "1.01"),
        ("top-k", "0", "-1"),
        ("rescore", "0.0", "-0.01"),
        ("rescore", "1.0", "1.01"),
        ("temperature", "0.0", "-0.1"),
        ("swap-every", "0.0", "-0.1"),
        ("dtype", "float32", "int8"),
        ("device", "cpu", "tpu"),
        ("peer", "generate", "vllm"),
    ],
)
def test_the_command_line_refuses_a_value_beyond_the_limits(option: str, good: str, bad: str) -> None:
    for value, exit_code in ((good, 0), (bad, 2)):
        found = CliRunner().invoke(app, ["bench", "engine", "m", f"--{option}={value}", "--tail", "x"])
        assert (f"--{option}" in found.output) == (exit_code == 2), found.output


def test_options_that_pass_together_make_the_requests_that_they_describe() -> None:
    together = options(requests=9, lengths="lognormal:9:20", fork="2:6", peer="generate", group_size=2, seed=3)
    together.check()
    assert together.pair("fork") == (2, 6) and together.pair("tail") == (0, 0)
    requests = make_requests(together, 50)
    assert lengths_of(requests) == draw_lengths(9, 9, 20, 3).tolist() and len(set(lengths_of(requests))) > 1
    assert [len(request.token_ids) for request in requests] == [5] * 9
    assert [request.group for request in requests] == [f"run/group-{i // 2}" for i in range(9)]
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
    assert lengths_of(make_requests(options(tail="1:90"), 50)) == [20, 20, 20, 90]


def test_before_the_tail_the_others_have_ended_and_the_tail_has_the_rest() -> None:
    assert drawn_before_tail([20, 20, 90, 90], 2, 80) == [20, 20, 20, 20]
    assert drawn_before_tail([20, 20, 90, 90], 2, 86) == [20, 20, 23, 23], "a launch ends a few steps later"
    assert drawn_before_tail([20, 20, 90, 90], 2, 87) == [20, 20, 23, 23]
    assert drawn_before_tail([20, 90], 1, 39) == [20, 19], "its prompt was computed one step later"


def test_requests_are_those_of_the_options() -> None:
    made = make_requests(options(requests=6, temperature=0.5, top_k=3, top_p=0.9), 50)
    assert len({request.id for request in made}) == len({request.sampling.seed for request in made}) == 6
    for request in made:
        assert len(request.token_ids) == 5 and request.token_ids.max() < 50
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (20, 0.5, 3, 0.9)


def test_requests_of_one_prompt_are_a_group() -> None:
    alone = make_requests(options(requests=4), 50)
    assert {request.group for request in alone} == {""}
    assert {request.group for request in other_round(alone, 1)} == {""}
    made = make_requests(options(requests=6, group_size=3), 50)
    for requests, name in ((made, "run"), (other_round(made, 2), "2/run")):
        assert [request.group for request in requests] == [f"{name}/group-0"] * 3 + [f"{name}/group-1"] * 3
        for first in (0, 3):
            prompts = {request.token_ids.tobytes() for request in requests[first : first + 3]}
            assert len(prompts) == 1


def test_another_round_has_other_ids_and_prompts() -> None:
    made = make_requests(options(requests=6), 50)
    for request, other in zip(made, other_round(made, 1), strict=True):
        assert request.id != other.id and other.sampling == request.sampling
        np.testing.assert_array_equal(other.token_ids, np.roll(request.token_ids, 1))


def test_the_warm_up_ends_in_the_same_order() -> None:
    requests = make_requests(options(requests=40, lengths="lognormal:60:256"), 50)
    warm = np.array(lengths_of(other_round(requests, 1, longest=64)))
    assert warm.max() == 64 and warm.min() >= 1
    assert (np.diff(warm[np.argsort(lengths_of(requests), kind="stable")]) >= 0).all()
    assert lengths_of(other_round(requests, 1, longest=1)) == [1] * 40
    assert lengths_of(other_round(requests, 1, longest=256)) == lengths_of(requests), "nothing is made longer"

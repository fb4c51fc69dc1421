from __future__ import annotations

import msgspec
import numpy as np
import pytest

from headrace.engines.base import Request, Sampling
from headrace.engines.requests import fork_requests
from headrace.errors import UserError

SAMPLING = Sampling(max_tokens=10, temperature=0.7, top_p=0.9, seed=3, stop_token_ids=(2,))
REQUEST = Request(id="a", token_ids=np.array([4, 5, 6], np.int32), sampling=SAMPLING, priority=2)
TOKENS = [4, 5, 6, 7, 8, 9]


def test_alternatives_go_on_from_the_pivot_with_what_is_left() -> None:
    forks = fork_requests(REQUEST, TOKENS, 5, 3)
    assert [f.id for f in forks] == ["a/fork5.0", "a/fork5.1", "a/fork5.2"]
    for fork in forks:
        assert fork.token_ids.tolist() == [4, 5, 6, 7, 8] and fork.token_ids.dtype == np.int32
        assert (fork.parent, fork.priority, fork.group) == ("a", 2, "a/fork")
        assert msgspec.structs.replace(fork.sampling, seed=3) == msgspec.structs.replace(SAMPLING, max_tokens=8)
    seeds = {fork.sampling.seed for fork in forks}
    assert len(seeds) == 3 and all(0 <= seed < 2**63 for seed in seeds) and 3 not in seeds
    assert [f.sampling.seed for f in fork_requests(REQUEST, TOKENS, 4, 3)] == [f.sampling.seed for f in forks]
    other = msgspec.structs.replace(REQUEST, sampling=msgspec.structs.replace(SAMPLING, seed=4), group="g")
    assert not seeds & {f.sampling.seed for f in fork_requests(other, TOKENS, 5, 3)}
    assert {f.group for f in fork_requests(other, TOKENS, 5, 3)} == {"g"}


def test_a_pivot_inside_the_prompt_costs_nothing() -> None:
    (fork,) = fork_requests(REQUEST, TOKENS, 2, 1)
    assert (fork.token_ids.tolist(), fork.sampling.max_tokens) == ([4, 5], 10)


@pytest.mark.parametrize(
    ("at", "n", "said"),
    [
        (0, 1, "token 0 is not among its tokens 1 to 6"),
        (7, 1, "token 7 is not among its tokens 1 to 6"),
        (3, 0, "0 alternatives were asked for; at least 1 is needed"),
    ],
)
def test_what_cannot_be_forked_is_said_in_one_line(at: int, n: int, said: str) -> None:
    with pytest.raises(UserError, match=f"fork of request a: {said}"):
        fork_requests(REQUEST, TOKENS, at, n)


def test_a_fork_at_the_end_of_a_request_has_nothing_to_sample() -> None:
    with pytest.raises(UserError, match="leaves nothing to sample after token 13"):
        fork_requests(REQUEST, [*TOKENS, *range(7)], 13, 1)

"""What a sequence records of its tokens, and what its deltas say of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.sequence import Sampled, Sequence


def make(prompt: int = 3) -> Sequence:
    request = Request(id="a", token_ids=np.arange(prompt, dtype=np.int32), sampling=Sampling(max_tokens=9))
    return Sequence(request, 0)


def extend(sequence: Sequence, *records: Any, **others: Any) -> None:
    sequence.extend(Sampled(sequence, *records, **others))


def test_deltas_hold_every_record_once_and_in_order() -> None:
    sequence = make()
    experts = [np.full((2, 1), i, np.int16) for i in range(4)]
    kept = [np.array(ids, np.int32) for ids in ([1, 5], [2], [], [0, 3, 7])]
    extend(sequence, [5], [-0.5], [1], kept=[kept[0]], routing=[experts[0]])
    first = sequence.delta()
    extend(sequence, [2, 4, 7], [-1.0, -2.0, -3.0], [1, 1, 2], kept=kept[1:], routing=experts[1:])
    assert sequence.unsent == 3
    second = sequence.delta("stop")
    assert (first.token_ids.tolist(), first.versions.tolist(), first.finish) == ([5], [1], None)
    assert (second.token_ids.tolist(), second.versions.tolist(), second.finish) == ([2, 4, 7], [1, 1, 2], "stop")
    assert second.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert first.kept is not None and second.kept is not None
    assert (first.kept.counts.tolist(), first.kept.token_ids.tolist()) == ([2], [1, 5])
    assert (second.kept.counts.tolist(), second.kept.token_ids.tolist()) == ([1, 0, 3], [2, 0, 3, 7])
    assert first.routing is not None and second.routing is not None
    assert first.routing.tolist() == [[[0], [0]]] and second.routing[:, 0, 0].tolist() == [1, 2, 3]
    assert (second.kept.counts.dtype, second.kept.token_ids.dtype, second.routing.dtype) == ("int32", "int32", "int16")
    last = sequence.delta()
    assert last.kept is not None and last.routing is not None
    assert (len(last.kept.counts), last.routing.shape) == (0, (0, 2, 1))


def test_without_records_a_delta_says_so() -> None:
    sequence = make()
    extend(sequence, [5], [-0.5], [1])
    delta = sequence.delta()
    assert delta.kept is None and delta.routing is None


def test_records_of_some_tokens_only_are_an_error() -> None:
    sequence = make()
    extend(sequence, [5], [-0.5], [1])
    with pytest.raises(RuntimeError, match="1 records of 2 tokens"):
        extend(sequence, [6], [-0.5], [1], kept=[np.array([6], np.int32)])
    with pytest.raises(RuntimeError, match="1 records of 2 tokens"):
        extend(make(), [5, 6], [-0.5, -0.5], [1])


def test_sampled_tokens_say_what_was_computed_and_under_which_version() -> None:
    sequence = make(prompt=3)
    sequence.kv_version = 4
    sequence.cover(3, 4)
    # The pass that sampled a token computed the one before it; the first of these was known to be computed.
    extend(sequence, [7, 8, 9], [0.0] * 3, [4, 4, 4])
    assert (sequence.computed, sequence.pure) == (5, 5)
    extend(sequence, [7, 8], [0.0] * 2, [4, 5])
    assert (sequence.computed, sequence.pure) == (7, 6)
    extend(sequence, [9], [0.0], [5])
    assert (sequence.computed, sequence.pure) == (8, 6)


def test_only_unsent_tokens_are_dropped() -> None:
    sequence = make()
    extend(sequence, [5], [-0.5], [1])
    sequence.delta()
    extend(sequence, [6, 7], [-1.0, -2.0], [1, 2])
    sequence.truncate(2)
    assert sequence.tokens == [0, 1, 2, 5, 6] and sequence.sampled == 2
    with pytest.raises(RuntimeError, match="were sent"):
        sequence.truncate(0)
    sequence.truncate(1)
    extend(sequence, [8], [-3.0], [3])
    delta = sequence.delta()
    assert (delta.token_ids.tolist(), delta.versions.tolist(), delta.logprobs.tolist()) == ([8], [3], [-3.0])
    extend(sequence, [9], [-1.0], [3])
    sequence.blocks = [0]
    with pytest.raises(RuntimeError, match="still runs"):
        sequence.truncate(2)

"""What a token stream returns of its tokens, for the journal."""

from __future__ import annotations

import numpy as np

from headrace.rollouts.stream import TokenStream
from headrace.types import NO_VERSION, Trace


def sampled(*tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.array(tokens, np.int32), np.full(len(tokens), -0.5, np.float32), np.full(len(tokens), 3, np.int32)


def test_nothing_is_saved_before_a_token_is_sampled() -> None:
    stream = TokenStream()
    stream.append_context(np.array([1, 2, 3], np.int32))
    assert stream.since(0) is None
    stream.append_sampled(*sampled(4))
    first = stream.since(0)
    assert first is not None and first.token_ids.tolist() == [1, 2, 3, 4], "the opening comes with the first token"
    assert stream.since(4) is None
    stream.append_sampled(*sampled(5, 6))
    later = stream.since(4)
    assert later is not None and later.token_ids.tolist() == [5, 6] and later.versions.tolist() == [3, 3]


def test_tokens_of_an_earlier_attempt_are_saved_if_one_was_sampled() -> None:
    opening = Trace.of_context(np.array([1, 2], np.int32))
    stream = TokenStream()
    stream.append_recorded(opening)
    assert stream.since(0) is None
    ids, logprobs, versions = sampled(7)
    trained = np.zeros(1, np.bool_)
    stream.append_recorded(Trace(token_ids=ids, trained=trained, logprobs=logprobs, versions=versions))
    found = stream.since(0)
    assert found is not None and found.versions.tolist() == [NO_VERSION, NO_VERSION, 3]

"""Recorded experts on their way from an engine's deltas to a batch: through turns, contexts and other traces."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.algorithms.assemble import assemble
from headrace.channel.codec import decode, encode
from headrace.errors import ChannelError
from headrace.rollouts.stream import TokenStream
from headrace.types import NO_EXPERT, Batch, Group, Prompt, Rollout, Trace

LAYERS, CHOSEN = 2, 3
FREE = [[NO_EXPERT] * CHOSEN] * LAYERS


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def experts(*tokens: int) -> np.ndarray:
    """A record that tells the token it belongs to."""
    return np.stack([np.full((LAYERS, CHOSEN), token, np.int16) for token in tokens])


def sampled(stream: TokenStream, tokens: list[int], routing: np.ndarray | None) -> None:
    n = len(tokens)
    stream.append_sampled(ints(*tokens), np.zeros(n, np.float32), np.zeros(n, np.int32), routing=routing)


def stream_of_two_turns() -> TokenStream:
    stream = TokenStream()
    stream.append_context(ints(1, 2))
    sampled(stream, [5], experts(5))
    stream.trace()
    sampled(stream, [6, 7], experts(6, 7))
    stream.append_context(ints(3))
    sampled(stream, [8], experts(8))
    return stream


EXPECTED = [FREE, FREE, experts(5)[0].tolist(), *experts(6, 7).tolist(), FREE, *experts(8).tolist()]


def test_every_sampled_token_of_a_trace_has_its_experts() -> None:
    trace = stream_of_two_turns().trace()
    assert trace.routing.dtype == np.int16
    assert trace.routing.tolist() == EXPECTED
    assert trace.extended(ints(1), np.zeros(1), ints(0), trained=True).routing.tolist() == [*EXPECTED, FREE]
    assert trace.part(2, 6).routing.tolist() == EXPECTED[2:6]
    assert stream_of_two_turns().since(4).routing.tolist() == EXPECTED[4:]
    plain = TokenStream()
    sampled(plain, [5], None)
    assert plain.trace().routing is None


def test_a_stream_that_goes_on_from_a_record_keeps_it() -> None:
    later = TokenStream()
    later.append_recorded(stream_of_two_turns().trace())
    sampled(later, [9], experts(9))
    assert later.trace().routing.tolist() == [*EXPECTED, *experts(9).tolist()]


def test_what_a_wire_may_reuse_is_copied_and_torn_records_are_refused() -> None:
    stream, record = TokenStream(), experts(5)
    sampled(stream, [5], record)
    record[:] = 0
    assert stream.trace().routing.tolist() == experts(5).tolist()
    with pytest.raises(ChannelError, match="2 tokens came with the experts of 1"):
        sampled(TokenStream(), [5, 6], experts(5))


def test_a_batch_has_the_experts_of_all_its_traces_and_travels_with_them() -> None:
    plain = Trace.of_context(ints(1, 2)).extended(ints(9), np.zeros(1), ints(0), trained=True)
    rollouts = [
        Rollout(id=f"0/{i}", index=i, traces=[trace], reward=float(i), ending="finished")
        for i, trace in enumerate([plain, stream_of_two_turns().trace()])
    ]
    group = Group(id=0, prompt=Prompt(id="p", text="p"), version=0, rollouts=rollouts)
    rest = {"advantage": "grpo", "normalize": "token", "group_size": 2, "max_tokens": 8, "temperature": 1.0}
    batch = assemble([group], step=1, version=0, **rest)
    batch = decode(Batch, [bytes(frame) for frame in encode(batch)])
    assert batch.routing.tolist() == [FREE, FREE, FREE, *EXPECTED]
    group.rollouts.pop()
    assert assemble([group], step=1, version=0, **rest).routing is None

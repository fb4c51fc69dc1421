"""Kept sets on their way from an engine's deltas to a batch: through turns, contexts and other traces."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.algorithms.assemble import assemble
from headrace.channel.codec import decode, encode
from headrace.errors import ChannelError
from headrace.rollouts.stream import TokenStream
from headrace.types import Batch, Group, Kept, Prompt, Rollout, Trace


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def sampled(stream: TokenStream, tokens: list[int], kept: Kept | None) -> None:
    n = len(tokens)
    stream.append_sampled(ints(*tokens), np.zeros(n, np.float32), np.zeros(n, np.int32), kept)


def lists(kept: Kept) -> list[list[int]]:
    return [kept.at(np.array([place])).token_ids.tolist() for place in range(len(kept.counts))]


def stream_of_two_turns() -> Trace:
    stream = TokenStream()
    stream.append_context(ints(1, 2))
    sampled(stream, [5], Kept(counts=ints(2), token_ids=ints(4, 5)))
    stream.trace()
    sampled(stream, [6, 7], Kept(counts=ints(1, 3), token_ids=ints(6, 7, 8, 9)))
    stream.append_context(ints(3))
    sampled(stream, [8], Kept(counts=ints(1), token_ids=ints(8)))
    return stream.trace()


def test_every_token_of_a_trace_has_its_set() -> None:
    trace = stream_of_two_turns()
    assert lists(trace.kept) == [[], [], [4, 5], [6], [7, 8, 9], [], [8]]
    assert lists(trace.extended(ints(1), np.zeros(1), ints(0), trained=True).kept)[-2:] == [[8], []]
    plain = TokenStream()
    sampled(plain, [5], None)
    assert plain.trace().kept is None


def test_torn_sets_are_refused() -> None:
    for counts, ids in (((1,), (4, 5)), ((1, 1), (4, 5))):
        with pytest.raises(ChannelError, match="kept sets"):
            sampled(TokenStream(), [5], Kept(counts=ints(*counts), token_ids=ints(*ids)))


def test_a_batch_has_the_sets_of_all_its_traces_and_travels_with_them() -> None:
    plain = Trace.of_context(ints(1, 2)).extended(ints(9), np.zeros(1), ints(0), trained=True)
    rollouts = [
        Rollout(id=f"0/{i}", index=i, traces=[trace], reward=float(i), ending="finished")
        for i, trace in enumerate([plain, stream_of_two_turns()])
    ]
    group = Group(id=0, prompt=Prompt(id="p", text="p"), version=0, rollouts=rollouts)
    rest = {"advantage": "grpo", "normalize": "token", "group_size": 2, "max_tokens": 8, "temperature": 1.0}
    batch = assemble([group], step=1, version=0, **rest)
    batch = decode(Batch, [bytes(frame) for frame in encode(batch)])
    assert lists(batch.kept) == [[], [], [], [], [], [4, 5], [6], [7, 8, 9], [], [8]]
    group.rollouts.pop()
    assert assemble([group], step=1, version=0, **rest).kept is None

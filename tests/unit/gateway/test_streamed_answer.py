from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from gateway_parts import END, merging_chat
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.engines.base import Delta
from headrace.gateway.openai_format import StreamedAnswer, split_calls
from headrace.tasks.chat import ChatFormat


def byte_chat() -> ChatFormat:
    """One token a byte: characters come in pieces."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return ChatFormat(tokenizer, None)


BYTES, MERGING = byte_chat(), merging_chat()


def delta(ids: list[int], finish: Any = None) -> Delta:
    n = len(ids)
    return Delta(
        id="r", token_ids=np.array(ids, np.int32), logprobs=-np.arange(n, dtype=np.float32),
        versions=np.ones(n, np.int32), finish=finish,
    )  # fmt: skip


def spoken(streamed: StreamedAnswer, ids: list[int], cuts: list[int]) -> list[str]:
    pieces, bounds = [], sorted({0, *(c % (len(ids) + 1) for c in cuts), len(ids)})
    for start, end in itertools.pairwise(bounds):
        pieces.append(streamed.hear(delta(ids[start:end], "length" if end == len(ids) else None)))
        if streamed.finish is not None:
            break
    return pieces


@settings(max_examples=150, deadline=None)
@given(st.text(min_size=1, max_size=12), st.lists(st.integers(0, 60), max_size=8))
def test_pieces_joined_are_the_text_and_no_piece_is_half_a_character(text: str, cuts: list[int]) -> None:
    ids = BYTES.encode(text).tolist()
    streamed = StreamedAnswer(BYTES)
    pieces = spoken(streamed, ids, cuts)
    assert "".join(pieces) == text == streamed.text == BYTES.decode(ids)
    assert streamed.token_ids == ids


@settings(max_examples=150, deadline=None)
@given(st.text("ab.", min_size=1, max_size=14), st.lists(st.integers(0, 60), max_size=8), st.sampled_from(["ab", "."]))
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_it(text: str, cuts: list[int], stop: str) -> None:
    streamed = StreamedAnswer(BYTES, [stop, "never"])
    pieces = spoken(streamed, BYTES.encode(text).tolist(), cuts)
    before, found, _ = text.partition(stop)
    assert "".join(pieces) == before == streamed.text
    assert BYTES.decode(streamed.token_ids) == before + found
    assert len(streamed.logprobs) == len(streamed.versions) == len(streamed)
    assert streamed.finish == ("stop" if found else "length")


def test_an_end_token_is_recorded_and_not_said() -> None:
    streamed = StreamedAnswer(MERGING)
    assert streamed.hear(delta([MERGING.token_id("a")])) == "a"
    assert streamed.hear(delta([MERGING.token_id("b"), END], "stop")) == "b"
    assert streamed.token_ids[-1] == END
    assert streamed.message() == {"role": "assistant", "content": "ab"}


def test_calls_are_taken_out_of_the_text_whole() -> None:
    text = 'Let me see.<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    streamed = StreamedAnswer(BYTES, tools=True)
    pieces = spoken(streamed, BYTES.encode(text).tolist(), list(range(0, 90, 3)))
    assert "".join(pieces) == "Let me see."
    (call,) = streamed.calls
    assert call["function"] == {"name": "add", "arguments": '{"a":1,"b":[2]}'}
    assert streamed.message()["tool_calls"] == [call]
    assert spoken(StreamedAnswer(BYTES), BYTES.encode(text).tolist(), [])[0] == text


@pytest.mark.parametrize("text", ["<tool_call>{]</tool_call>", "<tool_call>{}</tool_call>", "<tool_call>1", "a <b>"])
def test_what_is_not_a_call_stays_text(text: str) -> None:
    assert split_calls(text) == (text, [])
    streamed = StreamedAnswer(BYTES, tools=True)
    assert "".join(spoken(streamed, BYTES.encode(text).tolist(), [2, 5, 12])) == text

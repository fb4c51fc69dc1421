"""The bandwidth ceiling's arithmetic, against sums made token by token and sizes worked out by hand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.bench.engine import Footprint, decode_contexts, footprint, touched_experts
from headrace.bench.shapes import SHAPES

WINDOWS = st.dictionaries(st.none() | st.integers(1, 40), st.integers(1, 9), min_size=1, max_size=3)


def of(kv: dict[int | None, int] | None = None, **changes: int) -> Footprint:
    given = {"weights": 100, "shared": 100, "experts": 0, "expert_count": 0, "experts_per_token": 0, **changes}
    return Footprint(**given, kv_of_window=kv or {None: 1})


@given(prompt=st.integers(1, 30), lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), kv=WINDOWS)
def test_kv_reads_are_the_sum_over_every_decoded_token(
    prompt: int, lengths: list[int], kv: dict[int | None, int]
) -> None:
    expected = 0
    for length in lengths:
        for drawn in range(1, length):  # the first token comes from the prompt's own pass
            context = prompt + drawn
            expected += sum(size * (context if window is None else min(context, window)) for window, size in kv.items())
    assert of(kv).kv_read(decode_contexts(prompt, lengths)) == expected


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_experts_read_are_those_that_some_row_chooses(rows: int) -> None:
    """Over all ways in which rows can choose 2 of 4 experts."""
    choices = [(a, b) for a in range(4) for b in range(a)]
    counts = [len(set().union(*chosen)) for chosen in product(choices, repeat=rows)]
    found = of(shared=10, experts=400, expert_count=4, experts_per_token=2).weights_read(rows)
    assert found == pytest.approx(10 + 100 * sum(counts) / len(counts))


def test_experts_read_are_those_that_were_recorded() -> None:
    """Two layers of 4 experts, three answers of 2, 2 and 1 tokens, one expert a token."""
    routing = [np.array(record, np.int16)[..., None] for record in ([[0, 1], [2, 2]], [[0, 3], [2, 2]], [[1, 0]])]
    # Token 0: the rows chose {0, 1} and {0, 1, 3}. Token 1: {2} and {2}.
    assert touched_experts(routing, rows=3) == (2 + 3 + 1 + 1) / 4
    # In steps of two rows the third answer fills no step: {0} and {1, 3}, then {2} and {2}.
    assert touched_experts(routing, rows=2) == (1 + 2 + 1 + 1) / 4
    assert touched_experts([], rows=3) is None
    assert of(shared=10, experts=400, expert_count=4, experts_per_token=1).weights_read(3, touched=1.75) == 10 + 175


def test_a_dense_model_reads_all_weights_at_any_batch() -> None:
    assert of().weights_read(1) == of().weights_read(1000) == 100


def meta(name: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(SHAPES[name](), dtype=dtype)


def test_tied_embeddings_are_read_as_the_output() -> None:
    found = footprint(meta("smollm2-135m", torch.float32))
    assert found.weights == found.shared == 4 * 134_515_008
    assert found.kv_of_window == {None: 2 * 30 * 3 * 64 * 4}
    assert found.experts == found.expert_count == 0


def test_an_untied_input_embedding_and_unchosen_experts_are_not_read() -> None:
    found = footprint(meta("qwen3-moe-small"))
    experts = 16 * 64 * 3 * 1024 * 512 * 2
    embedding = 151936 * 1024 * 2
    attention = 1024 * 128 * (16 + 4 + 4 + 16) + 2 * 128
    rest = 2 * (16 * (attention + 64 * 1024 + 2 * 1024) + 1024)
    assert found.weights == experts + 2 * embedding + rest
    assert found.weights_read(1) == pytest.approx(embedding + rest + experts * 8 / 64)
    assert found.weights_read(10_000) == pytest.approx(embedding + rest + experts)


def test_windows_are_those_of_the_layers() -> None:
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    with torch.device("meta"):
        found = footprint(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert found.kv_of_window == {6: 2 * 2 * 4 * 4, None: 2 * 4 * 4}

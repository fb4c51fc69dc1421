"""Attention of a packed row by its three ways: autograd over blocks, gradients by hand, variable-length kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_kernels import PlainKernels

from headrace.models.attention import AttentionCall
from headrace.training import attention
from headrace.training.attention import PackedAttention
from headrace.training.rows import MicroBatch, Segment

NONE = np.zeros(0, np.int64)


def row_of(families):
    """A row from (prefix, continuations), prefix 0 being a sequence alone."""
    segments, positions, filled = [], [], 0

    def add(length, first, prefix):
        nonlocal filled
        segments.append(Segment(filled, length, prefix))
        positions.append(np.arange(first, first + length))
        filled += length

    for prefix, members in families:
        parent = None
        if prefix:
            parent = len(segments)
            add(prefix, 0, None)
        for length in members:
            add(length, prefix, parent)
    return MicroBatch(
        token_ids=np.zeros(filled, np.int64),
        position_ids=np.concatenate(positions),
        segments=tuple(segments),
        predictors=NONE,
        targets=NONE,
        sources=NONE,
        sequences=NONE,
    )


def visible(row, window):
    """Who sees whom, written out token by token."""
    owner = np.concatenate([np.full(s.length, i) for i, s in enumerate(row.segments)])
    n = len(owner)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for q in range(n):
        for k in range(n):
            same = owner[q] == owner[k] and k <= q
            prefix = row.segments[owner[q]].prefix == owner[k]
            near = window is None or row.position_ids[q] - row.position_ids[k] < window
            mask[q, k] = bool((same or prefix) and near)
    return mask


def reference(query, key, value, sinks, row, *, scaling, window, softcap):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * scaling
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible(row, window), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)
    return (weights[..., : key.shape[2]] @ value).transpose(1, 2)


families = st.lists(
    st.tuples(st.sampled_from([0, 1, 5, 9]), st.lists(st.integers(1, 7), min_size=1, max_size=3)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=20, deadline=None)
@given(families, st.sampled_from([None, 3]), st.sampled_from([None, 2.0]), st.booleans(), st.sampled_from([0, 64]))
def test_blocks_and_their_gradients_are_exact(shape, window, softcap, with_sinks, joined):
    check(shape, window, softcap, with_sinks, joined, kernels=None)


@settings(max_examples=20, deadline=None)
@given(families, st.sampled_from([None, 3, 20]))
def test_kernels_are_exact_with_shared_prefixes(shape, window):
    check(shape, window, None, False, 64, kernels=PlainKernels())


def check(shape, window, softcap, with_sinks, joined, kernels):
    # A family without a prefix is one sequence alone.
    row = row_of([(p, members if p else members[:1]) for p, members in shape])
    torch.manual_seed(0)
    n = len(row)
    tensors = [torch.randn(1, heads, n, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True) if with_sinks else None
    inputs = [*tensors, sinks] if with_sinks else tensors
    expected = reference(*tensors, sinks, row, scaling=0.3, window=window, softcap=softcap)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    before, attention.JOINED_TOKENS = attention.JOINED_TOKENS, joined
    try:
        context = PackedAttention(row, kernels)
    finally:
        attention.JOINED_TOKENS = before
    call = AttentionCall(
        layer=0, query=tensors[0], key=tensors[1], value=tensors[2], scaling=0.3, window=window, softcap=softcap,
        sinks=sinks,
    )  # fmt: skip
    found = context.attend(call)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(found, inputs, gradient), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        output, lse = context.attend_saving(call)
        *grads, of_sinks = context.attend_backward(call, output, lse, gradient)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip([*(g.transpose(1, 2) for g in grads)], wanted[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    if sinks is not None:
        torch.testing.assert_close(of_sinks, wanted[3], rtol=1e-11, atol=1e-11)


def test_a_window_within_a_shared_prefix_is_left_to_the_blocks():
    row = row_of([(6, [3, 4])])
    ranges = attention.RowRanges(row, torch.device("cpu"))
    assert ranges.takes(None)
    assert ranges.takes(10)
    assert not ranges.takes(9)
    assert attention.RowRanges(row_of([(0, [9])]), torch.device("cpu")).takes(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_real_kernels_take_nothing_on_a_cpu(dtype):
    x = torch.zeros(1, 2, 4, 16, dtype=dtype)
    assert not attention.Kernels().take(x, x)

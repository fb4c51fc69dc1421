"""The fused vocabulary projection against autograd over whole logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_models import random_batch, twins

from headrace.training import logprobs
from headrace.training.logprobs import PLAIN, Reading, read_head
from headrace.training.rows import MicroBatch, plan

VOCABULARY, WIDTH = 37, 12


def row_with(predictors, targets):
    none = np.zeros(0, np.int64)
    return MicroBatch(none, none, (), np.array(predictors), np.array(targets), none, none)


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_exact(size, temperature):
    # Position 2 has three targets, two of them the same token.
    row = row_with([2, 2, 2, 5, 0, 7, 9], [4, 4, 11, 36, 0, 9, 9])
    places, inverse = np.unique(row.predictors, return_inverse=True)
    torch.manual_seed(0)
    hidden = torch.randn(len(places), WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(len(inverse), dtype=torch.float64)
    whole = (hidden @ weight.t() / temperature).log_softmax(-1)
    expected = whole[torch.from_numpy(inverse), torch.from_numpy(row.targets)]
    wanted = torch.autograd.grad(expected, [hidden, weight], gradient)
    reading = Reading.of(row, inverse, size, torch.device("cpu"))
    found = read_head(hidden, weight, reading, temperature, PLAIN)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for one, other in zip(torch.autograd.grad(found, [hidden, weight], gradient), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_heads_that_do_more_than_multiply_are_noticed():
    assert logprobs.has_plain_head(twins("llama")[0])
    assert logprobs.has_plain_head(twins("qwen3")[0])
    # Gemma 2 caps its logits.
    assert not logprobs.has_plain_head(twins("gemma2")[0])


def test_a_row_of_a_model_is_read_alike():
    model, _ = twins("llama", torch.float64)
    row = plan(random_batch(3), micro_batch_tokens=10_000, share_prefixes=True)[0]
    places, inverse = np.unique(row.predictors, return_inverse=True)
    expected = logprobs.read_row(model, row).logprobs
    with logprobs.attending(logprobs.PackedAttention(row)):
        hidden = model.base_model(
            input_ids=torch.from_numpy(row.token_ids)[None],
            position_ids=torch.from_numpy(row.position_ids)[None],
            use_cache=False,
        ).last_hidden_state[0, torch.from_numpy(places)]
    reading = Reading.of(row, inverse, 7, torch.device("cpu"))
    found = read_head(hidden, model.get_output_embeddings().weight, reading, 1.0)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)

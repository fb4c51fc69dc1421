"""Sixteen-bit heads: what is read from them is that of float32 logits, and their gradient does not wear off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from random_models import VOCABULARY, random_batch, twins

from headrace.models.attention import attending
from headrace.models.head import WideHead, wide_product
from headrace.training.attention import PackedAttention
from headrace.training.logprobs import read_row
from headrace.training.rows import plan
from headrace.types import Kept

CAP = 4.0
"""Of the logits of the random Gemma 2."""


def half_model(family):
    """Its logits are tens apart: a step of bfloat16 is 1/8 there."""
    model, _ = twins(family, torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    return model


def row_of(batch):
    [row] = plan(batch, micro_batch_tokens=10_000, share_prefixes=True)
    return row


def states(model, row):
    """What the body gives at the positions that predict."""
    with torch.no_grad(), attending(PackedAttention(row)):
        found = model.base_model(
            input_ids=torch.from_numpy(row.token_ids)[None],
            position_ids=torch.from_numpy(row.position_ids)[None],
            use_cache=False,
        )
    return found.last_hidden_state[0, torch.from_numpy(row.predictors)].double()


def kept_sets(row, seed=0):
    """Of every other target five tokens, itself among them."""
    drawn = np.random.default_rng(seed)
    counts, tokens = [], []
    for number, target in enumerate(row.targets):
        mine = {int(target), *drawn.choice(VOCABULARY, 4, replace=False).tolist()} if number % 2 else set()
        counts.append(len(mine))
        tokens += sorted(mine)
    return Kept(token_ids=np.array(tokens, np.int32), counts=np.array(counts, np.int32))


@pytest.mark.parametrize("chunk", [1 << 20, 7 * VOCABULARY], ids=["at once", "in chunks"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_what_is_read_is_that_of_float32_logits(family, chunk):
    model, row = half_model(family), row_of(random_batch(1))
    weight = model.get_output_embeddings().weight.double()
    logits = states(model, row) @ weight.t()
    if family == "gemma2":
        logits = CAP * torch.tanh(logits / CAP)
    targets, kept = torch.from_numpy(row.targets), kept_sets(row)
    whole = logits.log_softmax(-1)
    expected = whole.gather(1, targets[:, None])[:, 0]
    disorder = -(whole.exp() * whole).sum(-1)
    start = 0
    for number, count in enumerate(kept.counts):
        mine = logits[number, torch.from_numpy(kept.token_ids[start : start + count]).long()].log_softmax(-1)
        start += count
        if count:
            expected[number] = mine[kept.token_ids[start - count : start].tolist().index(row.targets[number])]
            disorder[number] = -(mine.exp() * mine).sum()
    found = read_row(model, row, kept=kept, entropy="gradient", chunk_elements=chunk)
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.entropy.double(), disorder, rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", [1000, 10, 1])
def test_the_gradient_of_the_head_does_not_wear_off_with_the_number_of_chunks(positions):
    model, row = half_model("qwen3"), row_of(random_batch(1))
    weight = model.get_output_embeddings().weight
    exact = weight.detach().double().requires_grad_()
    (states(model, row) @ exact.t()).log_softmax(-1).gather(1, torch.from_numpy(row.targets)[:, None]).sum().backward()
    read_row(model, row, chunk_elements=positions * VOCABULARY).logprobs.sum().backward()
    # Rounded to bfloat16 once, when all chunks are in.
    assert float((weight.grad.double() - exact.grad).norm() / exact.grad.norm()) < 0.003


def test_an_adapter_of_the_head_is_wide_too():
    model, row = half_model("qwen3"), row_of(random_batch(1))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False), model)
    head = model.get_output_embeddings()
    a, b = (part["default"].weight.double() for part in (head.lora_A, head.lora_B))
    hidden = states(model, row)
    between = (hidden.bfloat16() @ a.bfloat16().t()).double()
    logits = hidden @ head.base_layer.weight.double().t() + head.scaling["default"] * between @ b.t()
    expected = logits.log_softmax(-1).gather(1, torch.from_numpy(row.targets)[:, None])[:, 0]
    found = read_row(model, row, chunk_elements=7 * VOCABULARY).logprobs
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    found.sum().backward()
    assert all(part["default"].weight.grad.abs().sum() > 0 for part in (head.lora_A, head.lora_B))


def test_it_is_in_force_for_a_while_only_and_for_16_bits_only():
    model = half_model("qwen3")
    head, hidden = model.get_output_embeddings(), torch.ones(1, 3, 64, dtype=torch.bfloat16)
    with WideHead(model).in_force():
        assert head(hidden).dtype == torch.float32
    assert head(hidden).dtype == torch.bfloat16 and "forward" not in vars(head)
    whole, _ = twins("qwen3")
    with WideHead(whole).in_force():
        assert "forward" not in vars(whole.get_output_embeddings())


def test_a_bias_is_added_in_float32():
    model = half_model("qwen3")
    head = model.lm_head = torch.nn.Linear(64, VOCABULARY, dtype=torch.bfloat16)
    hidden = torch.randn(5, 64, dtype=torch.bfloat16)
    with WideHead(model).in_force():
        found = head(hidden)
    torch.testing.assert_close(found, hidden.float() @ head.weight.float().t() + head.bias.float(), rtol=0, atol=1e-5)
    found.sum().backward()
    assert torch.equal(head.bias.grad, torch.full((VOCABULARY,), 5.0, dtype=torch.bfloat16))


def test_a_product_of_wider_numbers_is_theirs():
    left, right = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    assert torch.equal(wide_product(left, right), left @ right.t())

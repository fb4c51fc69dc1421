"""Log-probabilities of 32,768 tokens over 151,936: memory far below that of logits, and the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from headrace.models.attention import ATTENTION, attending
from headrace.training.attention import PackedAttention
from headrace.training.logprobs import read_row
from headrace.training.rows import plan_scoring

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOKENS, VOCABULARY, HIDDEN = 32_768, 151_936, 1024
TIMES_LESS = 5


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2 * TOKENS,
        tie_word_embeddings=request.param,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    return model.to("cuda").eval()


def measured(model, work):
    """What `work` answers, and the peak of memory that it took beyond what was there."""
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values = work()
    values.mean().backward()
    torch.cuda.synchronize()
    return values.detach(), torch.cuda.max_memory_allocated() - before


def test_peak_memory_is_far_below_naive(model, capsys):
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS + 1, dtype=np.int32)
    row = plan_scoring(tokens)

    def with_entropy():
        readings = read_row(model, row, entropy="gradient")
        return readings.logprobs + 0.1 * readings.entropy

    def naive():
        # The same body, then logits as anybody would take them.
        ids, targets = (torch.from_numpy(part.astype(np.int64)).cuda() for part in (tokens[:-1], tokens[1:]))
        with attending(PackedAttention(row)):
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]

    _, entropy_peak = measured(model, with_entropy)
    found, peak = measured(model, lambda: read_row(model, row).logprobs)
    gradients = {name: p.grad.float() for name, p in model.named_parameters()}
    expected, naive_peak = measured(model, naive)
    with capsys.disabled():
        print(
            f"\npeak {peak / 2**30:.2f} GiB in chunks, {entropy_peak / 2**30:.2f} GiB with the entropy, "
            f"{naive_peak / 2**30:.2f} GiB naive"
        )
    # Bfloat16 logits: a step of rounding is 1/64 between 2 and 4.
    assert float((found - expected).abs().max()) < 0.05
    assert float((found - expected).abs().mean()) < 2e-3
    for name, p in model.named_parameters():
        assert float((p.grad.float() - gradients[name]).norm() / gradients[name].norm()) < 0.02
    assert peak * TIMES_LESS < naive_peak
    assert entropy_peak * TIMES_LESS < naive_peak

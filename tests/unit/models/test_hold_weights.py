"""Models that compute with weights of somebody else: the same results, and nothing is copied."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.config.schema import LoraConfig
from headrace.errors import ModelError
from headrace.models.loading import hold_weights, named_weights
from headrace.models.lora import check_shareable

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


def llama(seed: int, *, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_computes_with_the_weights_it_is_given(tied: bool) -> None:
    model, other = llama(0, tied=tied), llama(1, tied=tied)
    parameters = dict(model.named_parameters())
    lent = {name: tensor.clone() for name, tensor in named_weights(other).items()}
    hold_weights(model, lent)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and parameter.data_ptr() == lent[name].data_ptr()
    head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head.data_ptr() == table.data_ptr()) == tied


def test_experts_whose_adapter_would_be_merged_are_refused() -> None:
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    model = Qwen3MoeForCausalLM(config)
    check_shareable(model, LoraConfig(targets=["q_proj"]))
    with pytest.raises(ModelError, match=r"^\[lora\] share_base: model\.layers\.0\.mlp\.experts\.down_proj is a stack"):
        check_shareable(model, LoraConfig(targets=["q_proj", "experts.down_proj"]))

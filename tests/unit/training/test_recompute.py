"""Computing layers again changes no bit; computing in bfloat16 leaves weights in float32; plans that would be wrong."""

from __future__ import annotations

import msgspec
import pytest
import torch
from random_models import model_dir, random_batch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config.schema import AlgorithmConfig, TrainingConfig, WarmStartConfig
from headrace.errors import ModelError
from headrace.models.loading import load_model
from headrace.training.layers import decoder_layers
from headrace.training.serving import prepare_model
from headrace.training.tensor_plan import layer_plan
from headrace.training.trainer import Trainer

TRAINING = TrainingConfig(learning_rate=1e-3, micro_batch_tokens=48)


def trained(path, **changes):
    training = msgspec.structs.replace(TRAINING, **changes)
    model = prepare_model(load_model(path), training)
    trainer = Trainer(model, AlgorithmConfig(), training, total_steps=3, warm_start=WarmStartConfig())
    losses = [trainer.step(random_batch(step, step=step)).loss for step in range(1, 4)]
    return losses, trainer


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_recomputed_layers_give_the_same_bits(tmp_path, family):
    path = model_dir(tmp_path / "model", family)
    losses, trainer = trained(path)
    again, recomputed = trained(path, activation_checkpointing=True)
    assert again == losses
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, recomputed.weights()[name]), name


def test_recomputing_really_happens(tmp_path):
    path = model_dir(tmp_path / "model")
    model = load_model(path)
    calls = []
    layer = decoder_layers(model)[1]
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    prepare_model(model, msgspec.structs.replace(TRAINING, activation_checkpointing=True, micro_batch_tokens=4096))
    trainer = Trainer(model, AlgorithmConfig(), TRAINING, total_steps=3, warm_start=WarmStartConfig())
    report = trainer.step(random_batch(1))
    assert len(calls) == 2 * report.micro_batches


def test_bfloat16_computes_near_and_keeps_weights_in_float32(tmp_path):
    path = model_dir(tmp_path / "model")
    losses, _ = trained(path)
    half, trainer = trained(path, compute_dtype="bfloat16")
    assert half != losses
    assert half == pytest.approx(losses, abs=0.05)
    assert {tensor.dtype for tensor in trainer.weights().values()} == {torch.float32}


def layer_of(family, **changes):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, **sizes, num_key_value_heads=2, vocab_size=61, pad_token_id=None, **changes)
    return decoder_layers(AutoModelForCausalLM.from_config(config))[0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "mixtral"])
def test_families_with_a_plan(family):
    layer = layer_of(family, head_dim=8) if family.startswith(("gemma", "qwen3")) else layer_of(family)
    plan = layer_plan(layer, family)
    matrices = {name for name, m in layer.named_modules() if isinstance(m, torch.nn.Linear) and "gate." not in name}
    assert {name.split(".")[-1] for name in plan} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert matrices <= plan.keys()


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("phi3", "Phi3ForCausalLM cannot be trained with [training] tensor_parallel > 1: it has qkv_proj.weight"),
        ("olmo2", "it has q_norm over all heads"),
        ("gpt_oss", "it has sinks in"),
        ("gpt_neox", "it has a layer without q/k/v/o projections"),
    ],
)
def test_families_without_a_plan_are_refused_in_one_line(family, why):
    names = {"phi3": "Phi3ForCausalLM"}
    with pytest.raises(ModelError) as caught:
        layer_plan(layer_of(family), names.get(family, family))
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)

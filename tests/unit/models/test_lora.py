"""Both modes against peft's own layers and merge, against float64, and through delivery and the engine."""

from __future__ import annotations

import copy
import math
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config.schema import EngineConfig, LoraConfig
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports import sender
from headrace.delivery.transports.base import SenderSettings
from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.errors import ModelError
from headrace.models import lora
from headrace.models.attention import ATTENTION, check_model
from headrace.models.loading import named_weights
from headrace.models.lora import ALL_LINEAR, Adapter, adapter_weights

Mode = Literal["merged", "unmerged"]
MODES: tuple[Mode, ...] = ("merged", "unmerged")
ATTENTION_ONLY = LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "v_proj"])
EVERYTHING = LoraConfig(rank=3, alpha=5.0, targets=[ALL_LINEAR])
SPECS = {
    "llama": ATTENTION_ONLY,
    "qwen3": EVERYTHING,
    "phi3": LoraConfig(rank=4, alpha=8.0, targets=["qkv_proj", "gate_up_proj", "down_proj"]),
    "qwen3_moe": LoraConfig(rank=4, alpha=8.0, targets=["q_proj", "o_proj"]),
}
VOCABULARY = 61
IDS = torch.arange(3, 21)[None]
PROMPT = np.arange(5, 14, dtype=np.int32)


def make_model(family: str, attention: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def trainer_of(model: Any, spec: LoraConfig, seed: int = 0) -> Any:
    """peft's own model of these weights, with an adapter that changes much."""
    config = PeftConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=ALL_LINEAR if ALL_LINEAR in spec.targets else spec.targets,
    )
    wrapped = get_peft_model(copy.deepcopy(model), config).eval()
    fill(published(wrapped), seed)
    return wrapped


def published(trainer: Any) -> dict[str, torch.Tensor]:
    return adapter_weights(trainer)


def fill(weights: Mapping[str, torch.Tensor], seed: int, scale: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)


def deliver(adapter: Adapter, weights: Mapping[str, torch.Tensor]) -> None:
    live = adapter.weights()
    assert live.keys() == weights.keys()
    for name, tensor in weights.items():
        live[name].copy_(tensor)
    adapter.apply()


@torch.no_grad()
def logprobs(model: Any) -> torch.Tensor:
    return torch.log_softmax(model(input_ids=IDS, use_cache=False).logits[0].double(), -1)


def targeted_weights(model: Any, adapter: Adapter) -> dict[str, torch.Tensor]:
    names = {name.replace("lora_A.", "") for name in adapter.weights() if ".lora_A." in name}
    return {name: tensor for name, tensor in named_weights(model).items() if name in names}


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("mode", MODES)
def test_names_and_shapes_are_those_that_a_peft_trainer_publishes(family: str, mode: Mode) -> None:
    model = make_model(family)
    trainer = trainer_of(model, SPECS[family])
    adapter = Adapter(model, SPECS[family], mode)
    expected = {name: tuple(tensor.shape) for name, tensor in published(trainer).items()}
    assert {name: tuple(tensor.shape) for name, tensor in adapter.weights().items()} == expected
    if family == "llama":
        assert "model.layers.0.self_attn.q_proj.lora_A.weight" in expected


def test_no_two_tensors_of_an_adapter_have_one_name() -> None:
    """peft wraps stacked experts twice."""
    config = PeftConfig(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"], target_modules=[])
    trainer = get_peft_model(make_model("qwen3_moe"), config)
    assert len(adapter_weights(trainer)) == sum(".lora_" in name for name, _ in trainer.named_parameters()) > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("down_proj", {"0.mlp.down_proj"}),
        (
            ALL_LINEAR,
            {f"{layer}.self_attn.{x}_proj" for layer in (0, 1) for x in "qkvo"}
            | {f"0.mlp.{x}_proj" for x in ("gate", "up", "down")},
        ),
    ],
)
def test_stacked_experts_are_no_targets(target: str, expected: set[str], mode: Mode) -> None:
    """Layer 0 has a plain MLP, layer 1 has experts of the same names, which peft would adapt in its stead."""
    model = make_model("qwen3_moe", mlp_only_layers=[0])
    adapter = Adapter(model, LoraConfig(rank=2, alpha=2.0, targets=[target]), mode)
    layers = {name.partition(".lora_")[0].removeprefix("model.layers.") for name in adapter.weights()}
    assert layers == expected
    assert adapter_weights(model).keys() == (adapter.weights().keys() if mode == "unmerged" else set())


@pytest.mark.parametrize("family", SPECS)
def test_unmerged_computes_what_the_peft_model_computes(family: str) -> None:
    model = make_model(family)
    before = logprobs(model)
    trainer = trainer_of(model, SPECS[family])
    adapter = Adapter(model, SPECS[family], "unmerged")
    torch.testing.assert_close(logprobs(model), before, atol=1e-6, rtol=0)
    deliver(adapter, published(trainer))
    expected = logprobs(trainer)
    torch.testing.assert_close(logprobs(model), expected, atol=1e-5, rtol=0)
    assert (expected - before).abs().max() > 0.5, "the adapter must matter"


@pytest.mark.parametrize("family", SPECS)
def test_merged_weights_are_those_of_merge_and_unload(family: str) -> None:
    model = make_model(family)
    trainer = trainer_of(model, SPECS[family])
    adapter = Adapter(model, SPECS[family], "merged")
    deliver(adapter, published(trainer))
    expected_logprobs = logprobs(trainer)
    merged = trainer.merge_and_unload()
    expected = dict(merged.named_parameters())
    for name, tensor in named_weights(model).items():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(logprobs(model), expected_logprobs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("family", SPECS)
def test_both_modes_give_one_distribution(family: str) -> None:
    models = [make_model(family) for _ in MODES]
    adapters = [Adapter(model, SPECS[family], mode) for model, mode in zip(models, MODES, strict=True)]
    for seed in (1, 2):
        for adapter in adapters:
            fill(adapter.weights(), seed)
            adapter.apply()
        merged, unmerged = (logprobs(model) for model in models)
        torch.testing.assert_close(merged, unmerged, atol=5e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_swaps_leave_no_trace(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "CHUNK", 100)  # several chunks to a weight, the last one short
    model = make_model("llama", dtype=dtype)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, :4] = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    pristine = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    addresses = {name: tensor.data_ptr() for name, tensor in named_weights(model).items()}
    adapter = Adapter(model, EVERYTHING, "merged")
    own_addresses = {name: tensor.data_ptr() for name, tensor in adapter.weights().items()}
    for seed in range(50):
        fill(adapter.weights(), seed, scale=10.0 ** (seed % 5 - 1))
        adapter.apply()
    for name in targeted_weights(model, adapter):
        assert not torch.equal(named_weights(model)[name], pristine[name])
    for name, tensor in adapter.weights().items():
        if ".lora_B." in name:
            tensor.zero_()
    adapter.apply()
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for name, tensor in named_weights(model).items():
        assert torch.equal(tensor.view(bits), pristine[name].view(bits)), name
        assert tensor.data_ptr() == addresses[name]
    assert {name: tensor.data_ptr() for name, tensor in adapter.weights().items()} == own_addresses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_merged_experts_are_the_float64_result_and_leave_no_trace(
    family: str, dtype: torch.dtype, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacks of both orientations, several chunks to a stack, an expert at a time in the reference."""
    monkeypatch.setattr(lora, "CHUNK", 32 * 48 * 3)
    spec = LoraConfig(rank=3, alpha=5.0, targets=["experts.gate_up_proj", "experts.down_proj"])
    model = make_model(family, dtype=dtype, num_local_experts=4)
    pristine = {name: tensor.clone() for name, tensor in named_weights(model).items()}
    addresses = {name: tensor.data_ptr() for name, tensor in named_weights(model).items()}
    adapter = Adapter(model, spec, mode)
    for seed in (1, 2):
        fill(adapter.weights(), seed)
        adapter.apply()
    for name in [name.removesuffix(".lora_A.weight") for name in adapter.weights() if ".lora_A." in name]:
        a, b = (adapter.weights()[f"{name}.lora_{side}.weight"].double() for side in "AB")
        for expert in range(4):
            product = b[:, expert::4] @ a[expert * 3 : (expert + 1) * 3]
            delta = product.t() if family == "gpt_oss" else product
            expected = pristine[name][expert].double() + 5.0 / 3 * delta
            found = named_weights(model)[name][expert].double()
            torch.testing.assert_close(found, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    for name, tensor in adapter.weights().items():
        if ".lora_B." in name:
            tensor.zero_()
    adapter.apply()
    for name, tensor in named_weights(model).items():
        assert torch.equal(tensor, pristine[name]) and tensor.data_ptr() == addresses[name], name


def test_a_broken_adapter_is_gone_with_the_next_one() -> None:
    model, other = make_model("llama"), make_model("llama")
    adapter, expected = (Adapter(m, ATTENTION_ONLY, "merged") for m in (model, other))
    for tensor in adapter.weights().values():
        tensor.fill_(math.nan)
    adapter.apply()
    assert all(tensor.isnan().all() for tensor in targeted_weights(model, adapter).values())
    for each in (adapter, expected):
        fill(each.weights(), 3)
        each.apply()
    for name, tensor in named_weights(model).items():
        assert torch.equal(tensor, named_weights(other)[name]), name


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rank=st.integers(1, 9),
    alpha=st.floats(0.01, 64),
    rows=st.integers(1, 20),
    columns=st.integers(1, 20),
    chunk=st.integers(1, 200),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_a_merged_weight_is_the_float64_result_rounded_once(
    seed: int, rank: int, alpha: float, rows: int, columns: int, chunk: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(columns, rows).to(dtype))
    pristine = model[0].weight.detach().double().clone()
    spec = LoraConfig(rank=rank, alpha=alpha, targets=["0"])
    adapter = Adapter(model, spec, "merged")
    fill(adapter.weights(), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "CHUNK", chunk)
        adapter.apply()
    a, b = (adapter.weights()[f"0.lora_{side}.weight"].double() for side in "AB")
    scaling = alpha / rank
    exact = pristine + scaling * (b @ a)
    size = pristine.abs() + scaling * (b.abs() @ a.abs())
    # Half a unit of the weight's dtype, and what float32 (float64) loses in a sum of rank + 2 terms.
    rounding = exact.abs() * torch.finfo(dtype).eps / 2 + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    wide = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    error = (model[0].weight.detach().double() - exact).abs()
    assert (error <= rounding + size * wide * (rank + 2)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_adapter_is_the_base_model_and_draws_no_numbers(mode: Mode, dtype: torch.dtype) -> None:
    model = make_model("llama", dtype=dtype)
    state = torch.get_rng_state()
    adapter = Adapter(model, ATTENTION_ONLY, mode)
    assert torch.equal(torch.get_rng_state(), state)
    adapter.apply()
    torch.testing.assert_close(logprobs(model), logprobs(make_model("llama", dtype=dtype)), atol=1e-6, rtol=0)
    for tensor in adapter.weights().values():
        assert not tensor.any()
        assert tensor.dtype == (torch.float32 if mode == "merged" else dtype)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_the_engine_generates_what_the_peft_model_does(family: str, mode: Mode) -> None:
    """Weights go from a peft trainer through a real delivery; the canary is scored after the adapter is applied."""
    model = make_model(family, ATTENTION)
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    trainer = trainer_of(plain, SPECS[family])
    adapter = Adapter(model, SPECS[family], mode)
    check_model(model)
    core = EngineCore(model, EngineConfig(slots=2, block_size=4, prefill_chunk=6), name="e", max_length=64, version=0)

    @torch.no_grad()
    def trainers_score(ids: np.ndarray) -> np.ndarray:
        table = torch.log_softmax(trainer(input_ids=torch.tensor(ids, dtype=torch.long)[None]).logits[0], -1)
        return table[np.arange(len(ids) - 1), ids[1:]].numpy()

    def engines_score(ids: np.ndarray) -> np.ndarray:
        adapter.apply()
        return core.score(ids)

    publisher = Publisher(sender("shm", SenderSettings(run_id=uuid.uuid4().hex[:8])), "float32", 1e-3, PROMPT)
    receiver = Receiver(adapter.weights(), "e")
    try:
        manifest = publisher.publish(1, 0, 1, published(trainer), trainers_score).result(30)
        proof = receiver.swap(receiver.stage(manifest), engines_score)
    finally:
        receiver.close()
        publisher.close()
    assert proof.accepted, proof.reason
    assert greedy(core) == reference_greedy(trainer)
    assert greedy(core) != reference_greedy(plain), "the adapter must matter"


def greedy(core: EngineCore, tokens: int = 20) -> list[int]:
    core.submit([Request(id=uuid.uuid4().hex, token_ids=PROMPT, sampling=Sampling(max_tokens=tokens, temperature=0.0))])
    found: list[int] = []
    for _ in range(4 * tokens):
        if not core.has_work:
            return found
        for delta in core.step():
            found += delta.token_ids.tolist()
    raise AssertionError("still at work")


@torch.no_grad()
def reference_greedy(model: Any, tokens: int = 20) -> list[int]:
    ids = torch.tensor(PROMPT, dtype=torch.long)[None]
    mask = torch.ones_like(ids)
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return [int(token) for token in out[0, len(PROMPT) :]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("family", "changes", "target", "line"),
    [
        ("phi3", {}, "q_proj", "LoRA target 'q_proj' is not in the model; its linear layers are down_proj, gate_up_"),
        ("llama", {}, "mlp", r"LoRA target model.layers.0.mlp is a .*LlamaMLP; only nn.Linear can be adapted"),
        ("llama", {}, "embed_tokens", r"embed_tokens is a torch.*Embedding; only nn.Linear can be adapted"),
        ("qwen3_moe", {}, "experts", r"layers.0.mlp.experts is a .*Experts; only nn.Linear can be adapted"),
        ("gpt2", {}, "c_attn", r"transformer.h.0.attn.c_attn is a .*Conv1D; only nn.Linear can be adapted"),
        ("gpt2", {}, ALL_LINEAR, r"transformer.h.0.attn.c_attn is a .*Conv1D; only nn.Linear can be adapted"),
        ("llama", {"tie_word_embeddings": True}, "lm_head", "lm_head shares its weight with model.embed_tokens.weight"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused_in_a_line(
    mode: Mode, family: str, changes: dict[str, Any], target: str, line: str
) -> None:
    model = make_model(family, **changes)
    names = list(named_weights(model))
    with pytest.raises(ModelError, match=line) as raised:
        Adapter(model, LoraConfig(rank=2, alpha=2.0, targets=[target]), mode)
    assert "\n" not in str(raised.value)
    assert list(named_weights(model)) == names, "a refused model is left alone"


@pytest.mark.parametrize("mode", MODES)
def test_an_untied_vocabulary_projection_can_be_adapted(mode: Mode) -> None:
    spec = LoraConfig(rank=4, alpha=6.0, targets=["lm_head"])
    model = make_model("llama", tie_word_embeddings=False)
    trainer = trainer_of(model, spec)
    deliver(Adapter(model, spec, mode), published(trainer))
    torch.testing.assert_close(logprobs(model), logprobs(trainer), atol=1e-5, rtol=0)

"""Packed products: what the model's own layers compute, from the weights that are live, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from headrace.config.schema import EngineConfig
from headrace.delivery.copying import copy_all
from headrace.delivery.digest import digest
from headrace.engines.base import Request, Sampling
from headrace.engines.embedded.core import EngineCore
from headrace.engines.embedded.runner import pack_linears, small_products
from headrace.models.attention import check_model
from headrace.models.loading import load_model, named_weights

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


@pytest.fixture(autouse=True)
def _pack_small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engines.embedded.runner.SMALLEST_PACKED", 1)


@pytest.fixture(params=["tied", "biased"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A Llama with a tied head, or a Qwen 2, whose query, key and value layers have biases."""
    torch.manual_seed(0)
    model: Any
    if request.param == "tied":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    return tmp_path


def plain(directory: Path) -> Any:
    """The same weights in transformers' own hands."""
    model_class = LlamaForCausalLM if "Llama" in (directory / "config.json").read_text() else Qwen2ForCausalLM
    return model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model: Any, prompts: list[list[int]], count: int) -> list[tuple[list[int], list[float]]]:
    """The engine's answers and their log-probabilities."""
    core = EngineCore(model, EngineConfig(slots=8, block_size=4), name="e", max_length=64, version=0)
    sampling = Sampling(max_tokens=count, temperature=0.0)
    core.submit(Request(id=str(i), token_ids=np.array(p, np.int32), sampling=sampling) for i, p in enumerate(prompts))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    logprobs: dict[str, list[float]] = {str(i): [] for i in range(len(prompts))}
    while core.has_work:
        for delta in core.step():
            tokens[delta.id] += delta.token_ids.tolist()
            logprobs[delta.id] += delta.logprobs.tolist()
    return [(tokens[i], logprobs[i]) for i in tokens]


def test_an_engine_on_packed_layers_answers_like_plain_transformers(directory: Path) -> None:
    model = load_model(directory)
    # By layer: q, k and v in one product, gate and up in one, o, down; and the head.
    assert pack_linears(model) == 2 * 4 + 1
    check_model(model)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 300, n).tolist() for n in (1, 3, 9, 17, 6)]
    reference = plain(directory)
    for prompt, (tokens, logprobs) in zip(prompts, greedy(model, prompts, 12), strict=True):
        with torch.no_grad():
            rows = reference(input_ids=torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
        assert tokens == rows.argmax(-1).tolist()
        np.testing.assert_allclose(logprobs, rows.max(-1).values, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 100])
def test_every_layer_equals_a_float64_product(directory: Path, rows: int) -> None:
    model = load_model(directory)
    pack_linears(model)
    torch.manual_seed(rows)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            x = torch.randn(1, rows, module.in_features)
            wanted = x.double() @ module.weight.detach().double().T
            if module.bias is not None:
                wanted += module.bias.detach().double()
            with torch.inference_mode():
                torch.testing.assert_close(module(x).double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_weights_that_are_copied_in_are_the_ones_that_answer(directory: Path, threads: int) -> None:
    model, reference = load_model(directory), plain(directory)
    before = digest(named_weights(model).items())
    pack_linears(model)
    assert digest(named_weights(model).items()) == before
    ids = np.arange(9, dtype=np.int32)
    score = EngineCore(model, EngineConfig(slots=2), name="e", max_length=64, version=0).score
    first = score(ids)
    generator = torch.Generator().manual_seed(1)
    new = {name: torch.randn(w.shape, generator=generator) * 0.2 for name, w in named_weights(model).items()}
    copy_all(named_weights(model), new, threads=threads)
    for name, live in named_weights(reference).items():
        live.copy_(new[name])
    with torch.no_grad():
        logprobs = reference(input_ids=torch.from_numpy(ids).long()[None]).logits[0].log_softmax(-1)
    wanted = logprobs[:-1].gather(1, torch.from_numpy(ids[1:]).long()[:, None])[:, 0].numpy()
    assert np.abs(first - wanted).max() > 0.1
    np.testing.assert_allclose(score(ids), wanted, atol=1e-4)


class Attention(nn.Module):
    """Query, key and value layers, called as its test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, n) for n in (12, 4, 4))


def test_siblings_answer_for_their_own_input_in_any_order() -> None:
    torch.manual_seed(0)
    module = Attention()
    wanted = {name: (m.weight.detach().clone(), m.bias.detach().clone()) for name, m in module.named_children()}
    assert pack_linears(module) == 1
    inputs = [torch.randn(1, 5, 16), torch.randn(1, 5, 16)]
    calls = [("q_proj", 0), ("k_proj", 1), ("v_proj", 0), ("v_proj", 1), ("q_proj", 1), ("q_proj", 1), ("k_proj", 0)]
    with torch.inference_mode():
        for name, which in calls:
            weight, bias = wanted[name]
            torch.testing.assert_close(getattr(module, name)(inputs[which]), inputs[which] @ weight.T + bias)


def test_gradients_are_those_of_the_plain_layer() -> None:
    layer = nn.Linear(8, 6)
    pack_linears(nn.Sequential(layer))
    x = torch.randn(5, 8)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(6, 8))


def test_a_changed_input_is_not_answered_from_the_last_one() -> None:
    """A whole round of siblings leaves nothing behind: the same tensor, changed in place, is multiplied anew."""
    module = Attention()
    pack_linears(module)
    x = torch.zeros(1, 3, 16)
    with torch.inference_mode():
        for value in (0.0, 1.0):
            x.fill_(value)
            for layer in (module.q_proj, module.k_proj, module.v_proj):
                wanted = (layer.weight.sum(-1) * value + layer.bias).expand(1, 3, -1)
                torch.testing.assert_close(layer(x), wanted)


def test_small_products_and_other_dtypes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engines.embedded.runner.SMALLEST_PACKED", 8 * 6 + 1)
    assert pack_linears(nn.Sequential(nn.Linear(8, 6), nn.Linear(8, 7))) == 1
    assert pack_linears(nn.Linear(8, 7).to(torch.bfloat16)) is None


def test_small_products_leave_onednn_as_it_was() -> None:
    # Torch turns oneDNN off by itself where it fails a product of 16 bits, as another test may have made it do.
    threads, enabled = torch.get_num_threads(), torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(True)
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            with small_products():
                assert torch.backends.mkldnn.enabled == (count > 1)
            assert torch.backends.mkldnn.enabled
    finally:
        torch.set_num_threads(threads)
        torch._C._set_mkldnn_enabled(enabled)

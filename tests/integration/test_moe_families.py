"""Whatever the family: packed logits equal the model's own attention and experts, and what routed is recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import make_model, prompts

from headrace.models.attention import ReferenceContext, attending
from headrace.models.experts import RoutingRecorder, RoutingShape, prepare_experts, recording

_SPARSE = {"num_experts_per_tok": 3, "num_hidden_layers": 3, "initializer_range": 0.15, "moe_intermediate_size": 48}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
}
ALL, LATER = (0, 1, 2), (1, 2)
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "mixtral": ({"num_local_experts": 8}, ALL),
    "qwen2_moe": ({"num_experts": 8, "mlp_only_layers": [1]}, (0, 2)),
    "qwen3_moe": ({"num_experts": 8, "decoder_sparse_step": 2, "num_hidden_layers": 4}, (1, 3)),
    "olmoe": ({"num_experts": 8}, ALL),
    "flex_olmo": ({"num_experts": 8}, ALL),
    "gpt_oss": ({"num_local_experts": 8, "sliding_window": 8}, ALL),
    "granitemoe": ({"num_local_experts": 8}, ALL),
    "granitemoeshared": ({"num_local_experts": 8, "shared_intermediate_size": 32}, ALL),
    "phimoe": ({"num_local_experts": 8, "num_experts_per_tok": 2}, ALL),
    "ernie4_5_moe": ({"moe_num_experts": 8, "moe_k": 3}, LATER),
    "hunyuan_v1_moe": ({"num_experts": 8, "moe_topk": 3}, ALL),
    "minimax_m2": ({"num_local_experts": 8}, ALL),
    "glm4_moe": ({**_LATENT, "num_key_value_heads": 2}, LATER),
    "dots1": ({**_LATENT, "num_key_value_heads": 2}, LATER),
    "deepseek_v2": ({**_LATENT, "topk_method": "group_limited_greedy"}, LATER),
    "deepseek_v3": (_LATENT, LATER),
}


def make_moe(family: str, **changes: Any) -> Any:
    model = make_model(family, **{**_SPARSE, **FAMILIES[family][0], **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Routers that start at zero would choose the first experts for every token.
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in name for part in ("gate.weight", "router", "correction_bias")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model


def plain_moe(model: Any) -> Any:
    """The same weights under the model's own attention and its own loop over experts."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    other.set_experts_implementation("eager")
    return other


def routers(model: Any) -> list[Any]:
    """The module beside each `experts` that chooses among them."""
    found = []
    for path, _ in model.named_modules():
        if path.endswith(".experts"):
            block = model.get_submodule(path.removesuffix(".experts"))
            found.append(block.gate if hasattr(block, "gate") else block.router)
    return found


@torch.no_grad()
def plain_logits_and_routing(model: Any, given: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence alone: logits [T, V], and the experts that the routers themselves answer with, [T, layers, k]."""
    answers: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> None:
        answers.extend(x for x in output if not x.is_floating_point())

    hooks = [router.register_forward_hook(keep) for router in routers(model)]
    logits, chosen = [], []
    for ids in given:
        answers.clear()
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0])
        chosen.append(torch.stack(answers, dim=1))
    for hook in hooks:
        hook.remove()
    return torch.cat(logits), torch.cat(chosen)


def packed(model: Any, given: list[torch.Tensor]) -> torch.Tensor:
    lengths = [len(ids) for ids in given]
    positions = torch.cat([torch.arange(n) for n in lengths])
    with attending(ReferenceContext(lengths)):
        return model(input_ids=torch.cat(given)[None], position_ids=positions[None], use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_recorded_experts_equal_plain_ones(family: str) -> None:
    model = make_moe(family)
    given = [torch.from_numpy(ids).long() for ids in prompts([7, 13, 1])]
    expected, routing = plain_logits_and_routing(plain_moe(model), given)

    shape = prepare_experts(model)
    layers = FAMILIES[family][1]
    assert shape == RoutingShape(layers=layers, per_token=2 if family == "phimoe" else 3, experts=8)
    recorder = RoutingRecorder(shape, tokens=24, device="cpu")
    recorder.chosen.fill_(-1)
    with torch.no_grad(), recording(recorder):
        found = packed(model, given)

    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert recorder.chosen[:21].tolist() == routing.tolist()
    assert (recorder.chosen[21:] == -1).all()
    # Otherwise equality would say little: tokens and layers choose differently.
    assert all(len({tuple(sorted(row)) for row in routing[:, i].tolist()}) > 3 for i in range(len(layers)))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_gradients_equal_those_of_the_models_own_experts(family: str) -> None:
    model = make_moe(family)
    own = copy.deepcopy(model)
    own.set_experts_implementation("eager")
    prepare_experts(model)
    given = [torch.from_numpy(ids).long() for ids in prompts([5, 9])]
    for each in (model, own):
        logprobs = torch.log_softmax(packed(each, given), -1)
        logprobs[torch.arange(14), torch.cat(given)].sum().backward()
    gradients = {name: p.grad for name, p in own.named_parameters()}
    for name, parameter in model.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None
            continue
        scale = gradients[name].abs().max().clamp_min(1e-3)
        assert (parameter.grad - gradients[name]).abs().max() <= 1e-4 * scale, name

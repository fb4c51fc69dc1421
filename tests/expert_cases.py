"""Experts of several families, for the tests of the kernels with and without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from headrace.engines.embedded.device.experts import find_swish
from headrace.engines.embedded.kernels.experts import Blocks, expert_products
from headrace.models.experts import weights_of

FAMILIES: dict[str, tuple[Any, str, str]] = {
    "qwen3_moe": (Qwen3MoeExperts, "num_experts", "moe_intermediate_size"),
    "mixtral": (MixtralExperts, "num_local_experts", "intermediate_size"),
    "qwen2_moe": (Qwen2MoeExperts, "num_experts", "moe_intermediate_size"),
    "gpt_oss": (GptOssExperts, "num_local_experts", "intermediate_size"),
}
"""The class of each family's experts, and the names of their number and of their inner size."""


@dataclass(frozen=True)
class Case:
    """Experts of one family, and the tokens that go to them."""

    family: str = "qwen3_moe"
    tokens: int = 9
    per_token: int = 2
    experts: int = 6
    used: int = 6
    """Only the first experts are chosen."""
    width: int = 32
    inner: int = 24
    seed: int = 0

    def module(self, device: str) -> Any:
        """The experts, in float32, with the family's own loop over them."""
        cls, count, inner = FAMILIES[self.family]
        sizes = {"hidden_size": self.width, count: self.experts, inner: self.inner}
        config = AutoConfig.for_model(self.family, **sizes)
        config._experts_implementation = "eager"
        module = cls(config)
        draw = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in module.parameters():
                # Wide enough that gates go beyond GPT-OSS's limit.
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * (4.0 / parameter.shape[-1] ** 0.5))
        return module.to(device).requires_grad_(requires_grad=False)

    def call(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, their experts, and the experts' weights."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        weights, index = torch.topk(torch.rand(self.tokens, self.used, generator=draw), self.per_token)
        hidden = torch.randn(self.tokens, self.width, generator=draw)
        return hidden.to(device), index.to(device), weights.to(device)


def by_kernels(module: Any, *call: torch.Tensor, blocks: Blocks | None = None) -> torch.Tensor:
    """What the kernels compute with the weights of this module."""
    hidden, index, weights = call
    swish = find_swish(module)
    assert swish is not None
    return expert_products(weights_of(module), swish, hidden, index, weights, blocks)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The size of the difference, relative to what was expected. NaN if something is NaN."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())

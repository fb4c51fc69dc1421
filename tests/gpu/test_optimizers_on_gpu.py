"""Every optimizer on a GPU: it goes on from its saved state to the bit."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from headrace.config.schema import TrainingConfig
from headrace.training.optimizer import Optimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def small() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(64, 128), torch.nn.Linear(128, 64), torch.nn.LayerNorm(64)).cuda()


def move(model: torch.nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator("cuda").manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, device="cuda")
        assert optimizer.begin(0.01)().changed


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw_8bit"])
def test_a_restored_optimizer_continues_to_the_bit(name: str) -> None:
    config = TrainingConfig(optimizer=name, weight_decay=0.01)
    if name == "adamw_8bit" and find_spec("bitsandbytes") is None and find_spec("torchao") is None:
        pytest.skip("needs torchao or bitsandbytes")
    straight, first, second = small(), small(), small()
    whole, half, rest = (Optimizer(model, config) for model in (straight, first, second))
    move(straight, whole, range(6))
    move(first, half, range(3))
    second.load_state_dict(first.state_dict())
    rest.restore({key: tensor.cpu() for key, tensor in half.tensors().items()})
    move(second, rest, range(3, 6))
    for expected, found in zip(straight.parameters(), second.parameters(), strict=True):
        assert torch.equal(expected, found)

"""A 16-bit head that is sharded over data ranks, or cut over tensor ranks: float32 logits all the same."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from rank_cases import TRAINING, model_dir, on_ranks, random_batch

from headrace.models.loading import load_model
from headrace.training.logprobs import read_row
from headrace.training.ranks import Ranks
from headrace.training.rows import plan
from headrace.training.serving import prepare_model

pytestmark = pytest.mark.slow


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def read_in_half(ranks: Ranks, path: Path, model_path: Path) -> None:
    """Every rank reads the same row; its head's input is what the expected values are made of."""
    model = load_model(model_path)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(3)
    weight = model.get_output_embeddings().weight.detach().bfloat16().double()
    prepare_model(model, msgspec.structs.replace(TRAINING, compute_dtype="bfloat16"), ranks)
    head, seen = model.get_output_embeddings(), []
    head.register_forward_pre_hook(lambda _, given: seen.append(whole(given[0]).double()), prepend=True)
    [row] = plan(random_batch(1), micro_batch_tokens=10_000, share_prefixes=True)
    found = read_row(model, row, entropy="value", chunk_elements=7 * 61)
    hidden = torch.cat([part.reshape(-1, part.shape[-1]) for part in seen])
    # The positions in their order; some have several targets.
    places = torch.from_numpy(row.predictors).unique(return_inverse=True)[1]
    logprobs = (hidden @ weight.t()).log_softmax(-1)[places]
    expected = logprobs.gather(1, torch.from_numpy(row.targets)[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs.double(), expected, rtol=0, atol=1e-5)
    found.logprobs.sum().backward()
    exact = weight.clone().requires_grad_()
    (hidden @ exact.t()).log_softmax(-1)[places].gather(1, torch.from_numpy(row.targets)[:, None]).sum().backward()
    gradient = whole(head.weight.grad).double() / ranks.data_ranks
    assert float((gradient - exact.grad).norm() / exact.grad.norm()) < 0.003


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_head_of_16_bits_gives_float32_logits(tmp_path, tensor_parallel):
    path = model_dir(tmp_path / "model", "qwen3")
    on_ranks(tmp_path / "ranks", 2, tensor_parallel, read_in_half, path)

"""A language model of one table, so that a canary can be scored in three lines on both sides."""

import numpy as np
import torch

from headrace.types import Float32Array, Int32Array

VOCABULARY = 16
CANARY = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)


def make_weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(VOCABULARY, VOCABULARY, generator=generator).to(dtype),
        "bias": torch.randn(VOCABULARY, generator=generator).to(dtype),
        "steps": torch.tensor(seed, dtype=torch.int64),
    }


def score(weights: dict[str, torch.Tensor], token_ids: Int32Array) -> Float32Array:
    tokens = torch.from_numpy(token_ids).long()
    logprobs = (weights["logits"].float() + weights["bias"].float()).log_softmax(-1)
    return np.asarray(logprobs[tokens[:-1], tokens[1:]].numpy(), np.float32)

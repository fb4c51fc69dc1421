"""What a teacher says about a sequence: the log-probability of every token, and the likeliest tokens in its place."""

import numpy as np
import numpy.typing as npt
import torch

from headrace.types import NO_VERSION, Float32Array, Int32Array, TeacherScores

CHUNK_ELEMENTS = 1 << 24
"""The number of logits that are copied at once."""


def read_likeliest(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, k: int, vocabulary: int
) -> torch.Tensor:
    """Return, for each of n targets, [log-probability, tail, k log-probabilities, k tokens], [n, 2 + 2 k].

    `logits` are [n, V]. The k tokens are the likeliest among the first `vocabulary` tokens, in ascending order. The
    tail is the logarithm of the probability of all other tokens; 0 if k is 0.
    """
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = []
    for start in range(0, len(logits), size):
        mine = slice(start, start + size)
        heated = logits[mine].float() / temperatures[mine, None]
        normaliser = heated.logsumexp(dim=-1)
        own = heated.gather(1, targets[mine, None])[:, 0] - normaliser
        ids = heated[:, :vocabulary].topk(k, dim=-1).indices.sort(dim=-1).values
        top = heated.gather(1, ids) - normaliser[:, None]
        others = heated.scatter(1, ids, -torch.inf).logsumexp(dim=-1) - normaliser if k else torch.zeros_like(own)
        # Token ids below 2^24 are exact in float32, so all numbers travel to the host as one tensor.
        parts.append(torch.cat([own[:, None], others[:, None], top, ids.float()], dim=1))
    return torch.cat(parts) if parts else logits.new_zeros(0, 2 + 2 * k)


def unpacked(numbers: npt.NDArray[np.float32], version: int) -> TeacherScores:
    """Return the numbers of `read_likeliest` as scores. The first token has nothing before it, and is not scored."""
    k = (numbers.shape[1] - 2) // 2
    first = TeacherScores.of_unscored(1, k)
    rest = TeacherScores(
        logprobs=_float32(numbers[:, 0]),
        versions=np.full(len(numbers), version, np.int32),
        top_ids=np.ascontiguousarray(numbers[:, 2 + k :]).astype(np.int32),
        top_logprobs=_float32(numbers[:, 2 : 2 + k]),
        tails=_float32(numbers[:, 1]),
    )
    joined = TeacherScores.joined([(1, first), (len(numbers), rest)])
    assert joined is not None
    return joined


def refusal(token_ids: Int32Array, k: int, vocabulary: int, rows: int, max_length: int, version: int) -> str:
    """Return why a sequence cannot be scored; empty if it can."""
    if version == NO_VERSION:
        return "the teacher has no proved version"
    if len(token_ids) > max_length:
        return f"a sequence of {len(token_ids)} tokens is longer than the teacher's limit of {max_length}"
    if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < rows:
        return f"a token id to score is outside of the vocabulary of {rows}"
    if vocabulary > rows:
        return f"the teacher has {rows} tokens, and scores of {vocabulary} are asked for"
    if k >= min(vocabulary, rows):
        return f"{k} likeliest tokens are asked for among {vocabulary}"
    return ""


def _float32(values: npt.NDArray[np.float32]) -> Float32Array:
    return np.ascontiguousarray(values, np.float32)

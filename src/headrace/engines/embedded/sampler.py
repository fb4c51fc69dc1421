"""Drawing tokens: the noise of a token is a function of (seed, position) alone.

One uniform number per row, hashed from its seed and absolute position, picks the token by the inverse of the
cumulative distribution. So a row's draw depends on nothing beside it in the batch, and is the same after preemption or
when a partial completion is resumed. The log-probability is that of the distribution really drawn from, in fp32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.engines.base import Sampling
from headrace.types import Float32Array

_MASK = (1 << 64) - 1
_HEAD = 1024
"""Top-p looks at this many best tokens first, and sorts the whole vocabulary only where they are not enough."""


def draw(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[npt.NDArray[np.int64], Float32Array]:
    """A token and its log-probability for every row of `logits` [R, V]; `positions` are those of the new tokens."""
    scaled = logits.float()
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        # Greedy rows keep their logits: their log-probabilities are the untempered ones.
        temperatures = torch.tensor([s.temperature or 1.0 for s in samplings], device=logits.device)
        scaled = scaled / temperatures[:, None]
    logprobs = torch.log_softmax(scaled, dim=-1)
    noise = uniforms([s.seed for s in samplings], positions)

    tokens = torch.empty(len(samplings), dtype=torch.long)
    chosen = torch.empty(len(samplings), dtype=torch.float32)
    for (greedy, top_k, top_p), rows in _by_rule(samplings, logprobs.shape[1]).items():
        mine = logprobs if len(rows) == len(samplings) else logprobs[rows]
        if greedy:
            values, indices = mine.max(dim=-1)
        else:
            u = torch.from_numpy(noise[rows]).to(mine.device)
            indices, values = _pick_truncated(mine, u, top_k, top_p) if top_k or top_p < 1 else _pick(mine, u)
        tokens[rows] = indices.cpu()
        chosen[rows] = values.cpu()
    return tokens.numpy(), chosen.numpy()


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position), by hashing."""
    seed = np.array([s & _MASK for s in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    # 52 bits: the largest is so far below 1 that its product with a mass stays below the mass.
    return (_mix(_mix(seed) ^ position) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of SplitMix64: every input bit changes every output bit with probability 1/2."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _by_rule(samplings: Sequence[Sampling], vocabulary: int) -> dict[tuple[bool, int, float], list[int]]:
    """Rows by how they are truncated. What a row computes then depends on its own rule only."""
    rules: dict[tuple[bool, int, float], list[int]] = defaultdict(list)
    for row, sampling in enumerate(samplings):
        greedy = sampling.temperature == 0
        top_k = 0 if greedy or sampling.top_k >= vocabulary else sampling.top_k
        rules[greedy, top_k, 1.0 if greedy else sampling.top_p].append(row)
    return rules


def _pick(logprobs: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    indices = _first_above(cumulative, u)
    return indices, logprobs.gather(1, indices[:, None])[:, 0]


def _pick_truncated(
    logprobs: torch.Tensor, u: torch.Tensor, top_k: int, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = logprobs.shape[1]
    width = top_k or min(_HEAD, vocabulary)
    indices, values, enough = _pick_from_best(logprobs, u, width, top_p, renormalize=bool(top_k))
    short = (~enough).nonzero()[:, 0]
    if width < vocabulary and not top_k and len(short):
        whole = _pick_from_best(logprobs[short], u[short], vocabulary, top_p, renormalize=False)
        indices[short], values[short] = whole[0], whole[1]
    return indices, values


def _pick_from_best(
    logprobs: torch.Tensor, u: torch.Tensor, width: int, top_p: float, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pick among the `width` best; also whether these reach `top_p` (of their own mass, if `renormalize`)."""
    best, ids = logprobs.topk(width, dim=-1)
    mass = best.exp().double()
    cumulative = mass.cumsum(-1)
    limit = top_p * cumulative[:, -1:] if renormalize else torch.full_like(cumulative[:, -1:], top_p)
    # The smallest set that reaches top_p: a token stays while the mass before it has not. The first always stays.
    kept = (cumulative - mass) < limit if top_p < 1 else torch.ones_like(mass, dtype=torch.bool)
    kept[:, 0] = True
    cumulative = (mass * kept).cumsum(-1)
    index = _first_above(cumulative, u)[:, None]
    logprob = best.gather(1, index)[:, 0] - cumulative[:, -1].log().float()
    return ids.gather(1, index)[:, 0], logprob, (cumulative[:, -1:] >= limit)[:, 0]


def _first_above(cumulative: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative mass exceeds `u` of the whole: never one of zero mass."""
    target = u[:, None] * cumulative[:, -1:]
    # A row of NaN finds no index; its log-probability will say so.
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=cumulative.shape[1] - 1)

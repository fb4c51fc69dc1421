"""Draws tokens. The noise of a token depends only on (seed, position).

Each row has one uniform number, hashed from its seed and its absolute position. The number picks a token by inverting
the cumulative distribution over the kept tokens, in the order of their ids. So a draw does not depend on the other rows
of the batch, and is the same after preemption or when a partial completion is resumed. The log-probability is that of
the distribution that was really drawn from, in fp32. `kernels.sampling` follows the same rules on a GPU, and this
module is its reference.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.requests import uniforms
from headrace.types import Float32Array, Int32Array

_BLOCK = 256
"""How many ids are summed at once when a token is picked."""
_HEAD = 1024
"""Top-p looks at this many best tokens first. It sorts the whole vocabulary only for rows where they are not enough."""


@dataclass(frozen=True)
class Drawn:
    """The drawn tokens and their records, row by row."""

    tokens: npt.NDArray[np.int64]
    logprobs: Float32Array
    kept: list[Int32Array | None]
    """The ids that truncation kept, ascending, for rows that asked for them. Empty for greedy rows."""


class _Rule(NamedTuple):
    """How a row is truncated. With `top_p` 1 and all other fields 0, every token is kept."""

    greedy: bool
    top_k: int
    top_p: float
    min_p: float

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Drawn:
    """Draw a token for every row of `logits` [R, V]. `positions` are the positions of the new tokens."""
    logits = _without_forbidden(logits.float(), samplings)
    # Relative to the row's best logit: likely tokens are then near zero, where fp32 is precise enough.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        # Greedy rows keep their logits, because their log-probabilities are untempered.
        temperatures = torch.tensor([s.temperature or 1.0 for s in samplings], device=logits.device)
        scaled /= temperatures[:, None]
    masses = scaled.exp()
    noise = torch.from_numpy(uniforms([s.seed for s in samplings], positions)).to(logits.device)

    tokens = torch.empty(len(samplings), dtype=torch.long)
    logprobs = torch.empty(len(samplings), dtype=torch.float32)
    kept: list[Int32Array | None] = [None] * len(samplings)
    for rule, rows in _by_rule(samplings, logits.shape[1]).items():
        whole = len(rows) == len(samplings)
        mine = masses if whole else masses[rows]
        keep = None
        if rule.truncates:
            keep = _keep(logits if whole else logits[rows], mine, rule)
            mine = mine * keep
        if rule.greedy:
            ids, total = logits[rows].argmax(-1), mine.sum(-1, dtype=torch.float64)
        else:
            ids, total = pick(mine, noise[rows])
        tokens[rows] = ids.cpu()
        logprobs[rows] = (scaled[rows, ids] - total.log()).float().cpu()
        for index, row in enumerate(rows):
            if samplings[row].record_kept:
                kept[row] = _ids(logits[row], keep[index] if keep is not None else None, rule)
    return Drawn(tokens.numpy(), logprobs.numpy(), kept)


def _without_forbidden(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    # An id outside the vocabulary is never drawn anyway.
    inside = range(logits.shape[1])
    pairs = [(row, token) for row, sampling in enumerate(samplings) for token in sampling.forbidden if token in inside]
    if not pairs:
        return logits
    rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
    return logits.index_put((rows, tokens), logits.new_tensor(float("-inf")))


def _by_rule(samplings: Sequence[Sampling], vocabulary: int) -> dict[_Rule, list[int]]:
    """Group the rows by how they are truncated, so that the result of a row depends only on its own rule."""
    rules: dict[_Rule, list[int]] = defaultdict(list)
    for row, sampling in enumerate(samplings):
        if sampling.temperature == 0:
            rules[_Rule(True, 0, 1.0, 0.0)].append(row)
            continue
        top_k = min(sampling.top_k or KEPT_LIMIT, KEPT_LIMIT) if sampling.record_kept else sampling.top_k
        rules[_Rule(False, top_k if top_k < vocabulary else 0, sampling.top_p, sampling.min_p)].append(row)
    return rules


def pick(masses: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first id whose cumulative mass exceeds `u` times the total mass, and the total mass.

    An id of zero mass is never returned. Blocks of ids are summed first, and only the block that holds the id is
    searched, because a cumulative sum over the whole vocabulary takes much longer than its sum.
    """
    rows, count = masses.shape
    blocks = torch.nn.functional.pad(masses, (0, -count % _BLOCK)).view(rows, -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    ends = sums.cumsum(-1)
    total = ends[:, -1]
    target = (u * total)[:, None]
    # A row of NaN finds no block and no id. Its log-probability is NaN, which shows the error.
    block = torch.searchsorted(ends, target, right=True).clamp_(max=sums.shape[1] - 1)
    inside = blocks[torch.arange(rows, device=masses.device), block[:, 0]]
    rest = (target - (ends - sums).gather(1, block)).clamp_(min=0.0)
    place = torch.searchsorted(inside.cumsum(-1, dtype=torch.float64), rest, right=True)
    # By rounding, the mass of the block may end just below its part of the target.
    last = (inside > 0).cumsum(-1, dtype=torch.int32).argmax(-1, keepdim=True)
    ids = block * _BLOCK + torch.minimum(place, last)
    return ids[:, 0].clamp_(max=count - 1), total


def _keep(logits: torch.Tensor, masses: torch.Tensor, rule: _Rule) -> torch.Tensor:
    """Return which tokens truncation keeps, [R, V]: all above the edge, and at the edge those with the lowest ids."""
    keep = logits > float("-inf")
    if rule.top_k or rule.top_p < 1:
        edge, places = _edge(logits, masses, rule)
        tie = logits == edge
        # If too many tokens are at the edge, the lowest ids are kept. The count is the row's own, not its neighbours'.
        keep &= (logits > edge) | (tie & (tie.cumsum(-1, dtype=torch.int32) <= places))
    if rule.min_p:
        # The mass of the best token is 1.
        keep &= masses >= rule.min_p
    return keep


def _edge(logits: torch.Tensor, masses: torch.Tensor, rule: _Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest logit that is kept, and how many tokens with exactly that logit are kept: both [R, 1]."""
    if not rule.top_k:
        limit = rule.top_p * masses.sum(-1, keepdim=True, dtype=torch.float64)
        width = min(_HEAD, logits.shape[1])
        edge, places, enough = _edge_of_best(logits, masses, width, limit)
        short = (~enough).nonzero()[:, 0]
        if width < logits.shape[1] and len(short):
            whole = _edge_of_best(logits[short], masses[short], logits.shape[1], limit[short])
            edge[short], places[short] = whole[0], whole[1]
        return edge, places
    best, ids = logits.topk(rule.top_k, dim=-1)
    edge = best[:, -1:]
    places = (best == edge).sum(-1, keepdim=True)
    if rule.top_p < 1:
        limit = rule.top_p * masses.gather(1, ids).sum(-1, keepdim=True, dtype=torch.float64)
        higher, fewer, _ = _edge_of_best(logits, masses, rule.top_k, limit)
        places = torch.where(higher == edge, torch.minimum(fewer, places), fewer)
        edge = higher
    return edge, places


def _edge_of_best(
    logits: torch.Tensor, masses: torch.Tensor, width: int, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logit at which the best tokens reach the mass `limit`, and how many tokens with that logit are kept.

    The third result says whether the best `width` tokens reach the limit at all.
    """
    best, ids = logits.topk(width, dim=-1)
    mass = masses.gather(1, ids).double()
    cumulative = mass.cumsum(-1)
    last = torch.searchsorted(cumulative, limit).clamp_(max=width - 1)
    edge = best.gather(1, last)
    above = (mass * (best > edge)).sum(-1, keepdim=True)
    # A token is kept if the mass before it has not reached the limit. The first token is always kept.
    places = (
        ((limit - above) / mass.gather(1, last)).ceil().nan_to_num(nan=1.0, posinf=width).clamp_(1, logits.shape[1])
    )
    return edge, places.long(), cumulative[:, -1] >= limit[:, 0]


def _ids(logits: torch.Tensor, keep: torch.Tensor | None, rule: _Rule) -> Int32Array:
    if rule.greedy:
        return np.empty(0, np.int32)
    # Without truncation (a small vocabulary), every token that may be drawn is kept.
    keep = logits > float("-inf") if keep is None else keep
    ids: Int32Array = keep.nonzero()[:, 0].cpu().numpy().astype(np.int32)
    return ids

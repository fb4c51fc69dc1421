"""Drawing tokens: the noise of a token is a function of (seed, position) alone.

One uniform number per row, hashed from its seed and absolute position, picks the token by the inverse of the
cumulative distribution over the kept tokens in the order of their ids. So a row's draw depends on nothing beside it in
the batch, and is the same after preemption or when a partial completion is resumed. The log-probability is that of the
distribution really drawn from, in fp32. `kernels.sampling` keeps the same rules on a GPU; this is its reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.types import Float32Array, Int32Array

_MASK = (1 << 64) - 1
_HEAD = 1024
"""Top-p looks at this many best tokens first, and sorts the whole vocabulary only where they are not enough."""


@dataclass(frozen=True)
class Drawn:
    """What was drawn, row by row."""

    tokens: npt.NDArray[np.int64]
    logprobs: Float32Array
    kept: list[Int32Array | None]
    """The ids left to draw from, ascending, where they were asked for. Empty if greedy: nothing is truncated then."""


class _Rule(NamedTuple):
    """What truncation leaves; all zero but `top_p`, which is one: everything."""

    greedy: bool
    top_k: int
    top_p: float
    min_p: float

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def draw(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Drawn:
    """A token and its log-probability for every row of `logits` [R, V]; `positions` are those of the new tokens."""
    logits = _without_forbidden(logits.float(), samplings)
    best, best_ids = logits.max(dim=-1, keepdim=True)
    # Under the row's best: what matters is near zero, where fp32 is fine enough for any temperature.
    scaled = logits - best
    if any(s.temperature not in (0.0, 1.0) for s in samplings):
        # Greedy rows keep their logits: their log-probabilities are the untempered ones.
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
            ids, total = best_ids[rows, 0], mine.sum(-1, dtype=torch.float64)
        else:
            ids, total = _pick(mine, noise[rows])
        tokens[rows] = ids.cpu()
        logprobs[rows] = (scaled[rows, ids] - total.log()).float().cpu()
        for index, row in enumerate(rows):
            if samplings[row].record_kept:
                kept[row] = _ids(logits[row], keep[index] if keep is not None else None, rule)
    return Drawn(tokens.numpy(), logprobs.numpy(), kept)


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


def _without_forbidden(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    # An id outside the vocabulary is never drawn anyway.
    inside = range(logits.shape[1])
    pairs = [(row, token) for row, sampling in enumerate(samplings) for token in sampling.forbidden if token in inside]
    if not pairs:
        return logits
    rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
    return logits.index_put((rows, tokens), logits.new_tensor(float("-inf")))


def _by_rule(samplings: Sequence[Sampling], vocabulary: int) -> dict[_Rule, list[int]]:
    """Rows by how they are truncated. What a row computes then depends on its own rule only."""
    rules: dict[_Rule, list[int]] = defaultdict(list)
    for row, sampling in enumerate(samplings):
        if sampling.temperature == 0:
            rules[_Rule(True, 0, 1.0, 0.0)].append(row)
            continue
        top_k = min(sampling.top_k or KEPT_LIMIT, KEPT_LIMIT) if sampling.record_kept else sampling.top_k
        rules[_Rule(False, top_k if top_k < vocabulary else 0, sampling.top_p, sampling.min_p)].append(row)
    return rules


def _pick(masses: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first id whose cumulative mass exceeds `u` of the whole, never one of zero mass; and the whole."""
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    ids = torch.searchsorted(cumulative, (u * total)[:, None], right=True)[:, 0]
    # A row of NaN finds no id; its log-probability will say so.
    return ids.clamp_(max=masses.shape[1] - 1), total


def _keep(logits: torch.Tensor, masses: torch.Tensor, rule: _Rule) -> torch.Tensor:
    """[R, V]: what truncation leaves: tokens above an edge, and of those at the edge the ones of the lowest ids."""
    keep = logits > float("-inf")
    if rule.top_k or rule.top_p < 1:
        edge, places = _edge(logits, masses, rule)
        tie = logits == edge
        # Only the lowest ids of an edge with too many tokens are taken: a row's own count decides, not its neighbours.
        keep &= (logits > edge) | (tie & (tie.cumsum(-1, dtype=torch.int32) <= places))
    if rule.min_p:
        # The best token's mass is one.
        keep &= masses >= rule.min_p
    return keep


def _edge(logits: torch.Tensor, masses: torch.Tensor, rule: _Rule) -> tuple[torch.Tensor, torch.Tensor]:
    """The least logit that stays, and how many tokens that have it may: both [R, 1]."""
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
    """Where the best tokens reach this mass, how many places are left there, and whether `width` of them do."""
    best, ids = logits.topk(width, dim=-1)
    mass = masses.gather(1, ids).double()
    cumulative = mass.cumsum(-1)
    last = torch.searchsorted(cumulative, limit).clamp_(max=width - 1)
    edge = best.gather(1, last)
    above = (mass * (best > edge)).sum(-1, keepdim=True)
    # A token stays while the mass before it has not reached the limit; the first always stays.
    places = (
        ((limit - above) / mass.gather(1, last)).ceil().nan_to_num(nan=1.0, posinf=width).clamp_(1, logits.shape[1])
    )
    return edge, places.long(), cumulative[:, -1] >= limit[:, 0]


def _ids(logits: torch.Tensor, keep: torch.Tensor | None, rule: _Rule) -> Int32Array:
    if rule.greedy:
        return np.empty(0, np.int32)
    # Without truncation (a small vocabulary) all that may be drawn is kept.
    keep = logits > float("-inf") if keep is None else keep
    ids: Int32Array = keep.nonzero()[:, 0].cpu().numpy().astype(np.int32)
    return ids

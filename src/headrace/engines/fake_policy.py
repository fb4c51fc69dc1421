"""The policy of the fake engine: real distributions without a model, the same on every machine.

Logits are hashed from (position, version), and noise is hashed from (seed, position). So log-probabilities, scores and
canaries agree with each other, and a token is a pure function of (seed, position, version). Noise and truncation follow
the same rules as in the embedded engine's sampler: from the same logits both draw the same token.
"""

import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.delivery.base import Canary, Manifest
from headrace.engines.base import KEPT_LIMIT, Sampling
from headrace.engines.requests import uniforms
from headrace.types import NO_VERSION, Float32Array, Int32Array

CANARY = np.arange(8, dtype=np.int32)


class FakeDraw(NamedTuple):
    """A drawn token with its records."""

    token: int
    logprob: float
    kept: Int32Array
    """The ids of the tokens that truncation kept, ascending; empty if greedy."""


class FakePolicy:
    """A deterministic substitute for a model: a distribution for every position and version."""

    def __init__(self, vocabulary: int = 64) -> None:
        self.vocabulary = vocabulary
        self._logits = lru_cache(maxsize=1 << 14)(self._compute_logits)

    def draw(self, sampling: Sampling, position: int, version: int) -> FakeDraw:
        """Draw a token at this position, by inverting the cumulative distribution in the order of token ids."""
        logits = _without(self._logits(position, version), sampling.forbidden)
        if sampling.temperature == 0:
            token = int(logits.argmax())
            return FakeDraw(token, float(_log_softmax(logits)[token]), np.empty(0, np.int32))
        tempered = (logits - logits.max()) / sampling.temperature
        kept = _kept(tempered, sampling)
        cumulative = np.cumsum(np.exp(tempered[kept]))
        noise = uniforms([sampling.seed], [position])[0]
        at = int(np.searchsorted(cumulative, noise * cumulative[-1], side="right"))
        logprob = tempered[kept[at]] - np.log(cumulative[-1])
        return FakeDraw(int(kept[at]), float(logprob), kept.astype(np.int32))

    def logprob(self, token: int, position: int, version: int) -> float:
        """Return the untempered log-probability of a token."""
        return float(_log_softmax(self._logits(position, version))[token])

    def score(self, token_ids: Int32Array, version: int) -> Float32Array:
        """Return the untempered log-probability of every token except the first, which has nothing before it."""
        scores = [self.logprob(int(token), i + 1, version) for i, token in enumerate(token_ids[1:])]
        return np.array(scores, np.float32)

    def manifest(self, version: int, *, parent: int = NO_VERSION, step: int = 0) -> Manifest:
        """Return the manifest that a trainer would publish for this version."""
        return Manifest(
            version=version,
            parent=parent,
            step=step,
            transport="fake",
            location="",
            entries=[],
            plan_digest=0,
            digest=stable_hash("weights", version, self.vocabulary),
            canary=Canary(token_ids=CANARY, logprobs=self.score(CANARY, version), tolerance=1e-6),
        )

    def _compute_logits(self, position: int, version: int) -> npt.NDArray[np.float64]:
        return np.random.Generator(np.random.Philox(key=stable_hash("logits", position, version))).standard_normal(
            self.vocabulary
        )


def stable_hash(*parts: int | str) -> int:
    """Hash these parts to 64 bits. The result is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    normalized: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalized


def _without(logits: npt.NDArray[np.float64], forbidden: tuple[int, ...]) -> npt.NDArray[np.float64]:
    inside = [token for token in forbidden if 0 <= token < len(logits)]
    if not inside:
        return logits
    left = logits.copy()
    left[inside] = -np.inf
    return left


def _kept(logits: npt.NDArray[np.float64], sampling: Sampling) -> npt.NDArray[np.int64]:
    """Return the ids that top-k, then top-p, then min-p keep, ascending.

    The caller shifts the logits so that the largest is 0. So exp(logit) is a token's probability relative to the
    likeliest token, which `min_p` is compared with. Among equal logits the lowest ids are kept.
    """
    order = np.argsort(-logits, kind="stable")
    order = order[: np.count_nonzero(logits > -np.inf)]
    top_k = min(sampling.top_k or KEPT_LIMIT, KEPT_LIMIT) if sampling.record_kept else sampling.top_k
    if top_k:
        order = order[:top_k]
    if sampling.top_p < 1:
        mass = np.exp(logits[order])
        # Keep the smallest set that reaches top_p: a token stays if the mass before it has not reached top_p.
        order = order[np.cumsum(mass) - mass < sampling.top_p * mass.sum()]
    if sampling.min_p:
        order = order[np.exp(logits[order]) >= sampling.min_p]
    return np.sort(order)

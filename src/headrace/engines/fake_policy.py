"""The policy of the fake engine: real distributions without a model, the same on every machine.

The logits of a position are hashed from (position, version) and the noise from (seed, position), so log-probabilities,
scores and canaries agree with each other, and a token is a pure function of (seed, position, version).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headrace.delivery.base import Canary, Manifest
from headrace.engines.base import Sampling
from headrace.types import NO_VERSION, Float32Array, Int32Array

CANARY = np.arange(8, dtype=np.int32)


class FakePolicy:
    """The distributions that stand in for a model's."""

    def __init__(self, vocabulary: int = 64) -> None:
        self.vocabulary = vocabulary
        self._logits = lru_cache(maxsize=1 << 14)(self._compute_logits)

    def sample(self, sampling: Sampling, position: int, version: int) -> tuple[int, float]:
        """The token that is drawn at this position, and its log-probability."""
        if sampling.temperature == 0:
            logprobs = _log_softmax(self._logits(position, version))
            token = int(logprobs.argmax())
        else:
            logprobs = _truncated(self._logits(position, version) / sampling.temperature, sampling)
            noise = _generator(stable_hash("noise", sampling.seed, position)).gumbel(size=self.vocabulary)
            token = int((logprobs + noise).argmax())
        return token, float(logprobs[token])

    def logprob(self, token: int, position: int, version: int) -> float:
        """The untempered log-probability of a token."""
        return float(_log_softmax(self._logits(position, version))[token])

    def score(self, token_ids: Int32Array, version: int) -> Float32Array:
        """The untempered log-probabilities of tokens 1..n."""
        scores = [self.logprob(int(token), i + 1, version) for i, token in enumerate(token_ids[1:])]
        return np.array(scores, np.float32)

    def manifest(self, version: int, *, parent: int = NO_VERSION, step: int = 0) -> Manifest:
        """What a trainer would publish for this version."""
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
        return _generator(stable_hash("logits", position, version)).standard_normal(self.vocabulary)


def stable_hash(*parts: int | str) -> int:
    """64 bits of these parts, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def _generator(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    normalized: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalized


def _truncated(logits: npt.NDArray[np.float64], sampling: Sampling) -> npt.NDArray[np.float64]:
    """Log-probabilities after top-k, then top-p: minus infinity for what they cut."""
    order = np.argsort(-logits, kind="stable")
    kept = order[: sampling.top_k] if sampling.top_k else order
    mass = np.exp(_log_softmax(logits[kept]))
    # The smallest set that reaches top_p: a token stays while the mass before it has not.
    kept = kept[(np.cumsum(mass) - mass) < sampling.top_p] if sampling.top_p < 1 else kept
    logprobs = np.full(len(logits), -np.inf)
    logprobs[kept] = _log_softmax(logits[kept])
    return logprobs

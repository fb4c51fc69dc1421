"""A base class for users' engines that run a Hugging Face model: it loads new weights and scores sequences.

A pass and a load each run within one turn of the event loop, so a pass never sees two versions of the weights.
A subclass implements `generate` and `abort`.
"""

from __future__ import annotations

import torch

from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Request
from headrace.engines.supplied import EngineContext
from headrace.errors import UserError
from headrace.types import Float32Array, Int32Array


class PlainEngine:
    """An `Engine` without `generate` and `abort`."""

    def __init__(self, context: EngineContext) -> None:
        self.name = context.name
        self.model = context.load_model()
        self._receiver = context.receiver(self.model)

    @property
    def version(self) -> int:
        """The version that the live weights are proved to be. While it is -1, nothing may be sampled."""
        return self._receiver.version

    def logprobs(self, token_ids: Int32Array | list[int], temperature: float = 1.0) -> torch.Tensor:
        """Return the log-probabilities of all possible next tokens after each of these tokens ([n, vocabulary])."""
        with torch.no_grad():
            logits = self.model(torch.tensor(token_ids, dtype=torch.long)[None]).logits[0].float()
        logprobs: torch.Tensor = (logits / temperature).log_softmax(-1)
        return logprobs

    async def load(self, manifest: Manifest) -> Proof:
        """See `Engine.load`."""
        return self._receiver.load(manifest, self._score)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """See `Engine.score`."""
        return self._score(token_ids)

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """Raise `UserError`, because requests share nothing in this engine."""
        raise UserError(f"{type(self).__name__} cannot fork a running request: ask for a new one with its tokens")

    async def close(self) -> None:
        """See `Engine.close`."""
        self._receiver.close()

    def _score(self, token_ids: Int32Array) -> Float32Array:
        next_ids = torch.tensor(token_ids, dtype=torch.long)[1:, None]
        scores: Float32Array = self.logprobs(token_ids)[:-1].gather(1, next_ids)[:, 0].cpu().numpy()
        return scores

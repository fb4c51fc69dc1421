"""Log-probabilities by plain Hugging Face: its own model class, its own eager attention, one sequence at a time.

No cache, no packing, no engine: nothing that produced the recorded numbers has a part in these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from headrace.delivery.digest import digest
from headrace.errors import ModelError
from headrace.models.loading import named_weights
from headrace.types import Float32Array, Int32Array


class PlainModel:
    """A model directory, loaded as anybody would load it."""

    def __init__(self, path: Path, dtype: str) -> None:
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=getattr(torch, dtype), attn_implementation="eager"
            ).eval()
        except (ValueError, KeyError, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{path} cannot be loaded as a causal language model: {reason}") from error

    @property
    def digest(self) -> int:
        """Of the weights, as a delivery proves them."""
        return digest(named_weights(self._model).items())

    def logprobs(self, token_ids: Int32Array, temperature: float) -> Float32Array:
        """Log-probabilities of tokens 1..n given their prefix, of the distribution at this temperature ([n - 1])."""
        tokens = torch.tensor(token_ids.tolist())
        with torch.inference_mode():
            logits = self._model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float() / temperature
            chosen = logits.gather(1, tokens[1:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
        found: Float32Array = chosen.numpy()
        return found

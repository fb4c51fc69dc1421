"""Log-probabilities by plain Hugging Face: its own model class, its own eager attention, one sequence at a time.

There is no cache, no packing and no engine: nothing that produced the recorded numbers takes part.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from headrace.delivery.digest import digest
from headrace.errors import ModelError
from headrace.models.loading import UNUSABLE, named_weights
from headrace.models.lora import adapter_weights
from headrace.training.checkpoints.base import base_of, refuse_pickled
from headrace.training.lora import ADAPTER_FILE
from headrace.types import Float32Array, Int32Array, Kept


class PlainModel:
    """A model directory, or an adapter with its base model, loaded in the ordinary way."""

    def __init__(self, path: Path, dtype: str) -> None:
        refuse_pickled(path)
        self._adapted = (path / ADAPTER_FILE).is_file()
        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                base_of(path) if self._adapted else path,
                dtype=getattr(torch, dtype),
                attn_implementation="eager",
            ).eval()
            if self._adapted:
                from peft import PeftModel  # Imported late, because it takes seconds.

                self._model = PeftModel.from_pretrained(self._model, str(path)).eval()
        except UNUSABLE as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ModelError(f"{path} cannot be loaded as a causal language model: {reason}") from error

    @property
    def digest(self) -> int:
        """The digest of the delivered weights or adapter, as a delivery proves it."""
        delivered = adapter_weights(self._model) if self._adapted else named_weights(self._model)
        return digest(delivered.items())

    def logprobs(
        self, token_ids: Int32Array, temperature: float | Float32Array, kept: Kept | None = None
    ) -> Float32Array:
        """Return the log-probabilities of tokens 1..n given their prefix ([n - 1]), each among its kept set.

        `temperature` is one for all of these tokens, or one for each.
        """
        tokens = torch.tensor(token_ids.tolist())
        with torch.inference_mode():
            logits = self._model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float()
            logits = logits / torch.tensor(temperature, dtype=torch.float32).reshape(-1, 1)
            if kept is not None:
                logits = _truncated(logits, kept)
            chosen = logits.gather(1, tokens[1:, None])[:, 0] - torch.logsumexp(logits, dim=-1)
        found: Float32Array = chosen.numpy()
        return found


def _truncated(logits: torch.Tensor, kept: Kept) -> torch.Tensor:
    """Return the logits of tokens 1..n. Tokens outside a kept set get minus infinity."""
    ends = kept.counts.cumsum()
    for token, (count, end) in enumerate(zip(kept.counts.tolist(), ends.tolist(), strict=True)):
        if token and count:
            outside = torch.ones_like(logits[token - 1], dtype=torch.bool)
            outside[kept.token_ids[end - count : end].tolist()] = False
            logits[token - 1].masked_fill_(outside, -torch.inf)
    return logits

"""Merges a LoRA adapter into whole weights: the adapter's product is added to the pristine weights of the model.

The pristine weights come from the model's directory, never from weights with an earlier adapter. After any number of
swaps, the result therefore depends on the last adapter only. An adapter that was trained on other weights is refused,
because the digests differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from headrace.delivery.digest import digest
from headrace.errors import DeliveryError

_A, _B = ".lora_A.weight", ".lora_B.weight"


class Pristine:
    """The weights in a model's directory under their own names, cast to the serving dtype."""

    def __init__(self, directory: Path, dtype: torch.dtype, *, tied: bool = False) -> None:
        """Open the files of a model; with `tied`, ignore `lm_head.weight`, because the embedding is used instead."""
        self.weights: dict[str, torch.Tensor] = {}
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise DeliveryError(f"{directory} holds no safetensors to add an adapter to")
        for file in files:
            with safe_open(file, framework="pt") as opened:  # Mapped, so tensors that are never used cost no memory.
                for name in opened.keys():  # noqa: SIM118 - it is not a dictionary
                    self.weights[name] = opened.get_tensor(name).to(dtype)
        if tied:
            self.weights.pop("lm_head.weight", None)
        self._digest: int | None = None

    def digest(self) -> int:
        """Return the digest of all pristine weights; it must equal the trainer's digest of its base model."""
        if self._digest is None:
            self._digest = digest(self.weights.items())
        return self._digest

    def with_adapter(self, adapter: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
        """Return all weights with the adapter merged.

        A weight with a LoRA pair becomes W + scaling * B @ A. A weight that was trained whole is replaced.
        """
        found = dict(self.weights)
        for name, tensor in adapter.items():
            target = name.removesuffix(_A).removesuffix(_B) + ".weight" if name.endswith((_A, _B)) else name
            if target not in self.weights:
                raise DeliveryError(f"the adapter changes {target}, which this server's model does not have")
            pristine = self.weights[target]
            if name.endswith(_A):
                a, b = tensor, adapter[name.removesuffix(_A) + _B]
                product = b.to(torch.float32) @ a.to(torch.float32)
                found[target] = torch.add(pristine.to(torch.float32), product, alpha=scaling).to(pristine.dtype)
            elif not name.endswith(_B):
                found[target] = tensor.to(pristine.dtype)
        return found

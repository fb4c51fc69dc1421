"""Counts the floating-point operations that training needs. MFU is this count per second, as a share of the GPU's peak.

    a token      6 x parameters of the layers, forward and backward; of experts, only those that the token goes through
    a pair       12 x heads x head size x layers, for each query and each key that the query sees (causal attention)
    a target     6 x hidden size x vocabulary

Work on padding, masked work and recomputation are not counted, and neither are embeddings, norms, softmax and the
optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Part of a GPU's name -> its peak of dense bfloat16 operations per second."""


FORMULA = (
    "n * (a_token + a_target) + n * (n + 1) / 2 * a_pair, summed over sequences of n + 1 tokens; "
    "a_token = 6 * parameters, input embeddings and head left out, of experts those that a token passes; "
    "a_pair = 12 * heads * head_size * layers; "
    "a_target = 6 * hidden_size * vocabulary"
)
"""The formula of `Flops.of`, in words, with the coefficients of `count_flops`."""


@dataclass(frozen=True)
class Flops:
    """The operations of one model, forward and backward: for a token, for a query-key pair, and for a target."""

    a_token: int
    a_pair: int
    a_target: int

    def of(self, lengths: Iterable[int]) -> int:
        """Return the operations of a step over sequences of these lengths. All tokens but the first are targets."""
        # The last token of a sequence is only a target and is not computed itself.
        own = [int(length) - 1 for length in lengths]
        return sum(n * (self.a_token + self.a_target) + n * (n + 1) // 2 * self.a_pair for n in own)


def count_flops(model: Any) -> Flops:
    """Return the coefficients of the formula, from the model's parameters and configuration."""
    config = model.config.get_text_config()
    outer = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    parameters = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in outer:
            continue
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1.0
        parameters += parameter.numel() * share
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Flops(
        a_token=round(6 * parameters),
        a_pair=12 * heads * size * int(config.num_hidden_layers),
        a_target=6 * int(model.get_output_embeddings().weight.numel()),
    )


def peak_of(device_name: str) -> float | None:
    """Return the peak of this GPU in operations per second; None if it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)

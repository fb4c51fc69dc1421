"""The arithmetic that training needs, and no more: what MFU is a share of.

    a token      6 x parameters of the layers (those that it passes, of experts), forward and backward
    a pair       12 x heads x head size x layers, for each query and key that it sees (causal attention counted once)
    a target     6 x hidden size x vocabulary

Nothing that is computed again, padded or masked is counted, nor embeddings, norms, softmax and the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bfloat16 operations a second, by what a GPU's name contains."""


FORMULA = (
    "n * (a_token + a_target) + n * (n + 1) / 2 * a_pair, summed over sequences of n + 1 tokens; "
    "a_token = 6 * parameters, input embeddings and head left out, of experts those that a token passes; "
    "a_pair = 12 * heads * head_size * layers; "
    "a_target = 6 * hidden_size * vocabulary"
)
"""What `Flops.of` computes from what `count_flops` counts."""


@dataclass(frozen=True)
class Flops:
    """Of one model."""

    a_token: int
    a_pair: int
    a_target: int

    def of(self, lengths: Iterable[int]) -> int:
        """A step over sequences of these lengths, all but whose first tokens are targets."""
        # The last token of a sequence is a target and is not computed itself.
        own = [int(length) - 1 for length in lengths]
        return sum(n * (self.a_token + self.a_target) + n * (n + 1) // 2 * self.a_pair for n in own)


def count_flops(model: Any) -> Flops:
    """The formula's figures, from the model's parameters and configuration."""
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
    """What this GPU could do at most; None where that is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)

"""The options of the training benchmark, their check, and the batches that follow from them.

Every token but the first of a sequence is trained. Padding stands for the work of a trainer without packing: it is
tokens before a sequence that are computed but not trained. No torch is imported, so a mistake in the options is
reported at once.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.bench.lengths import make_lengths
from headrace.errors import UserError
from headrace.types import Batch

Lengths = npt.NDArray[np.int64]


class TrainBench(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `headrace bench train`, as they were given."""

    model: str
    random_weights: bool = False
    tokens: int = 65536
    """The number of tokens in a step, without padding."""
    sequence: int = 4096
    lengths: str = ""
    steps: int = 5
    micro_batch_tokens: int = 16384
    device: str = "auto"
    compute_dtype: str = ""
    pack: bool = True
    chunk: bool = True
    compile: bool = True
    checkpointing: bool = False
    compare: bool = False
    seed: int = 0

    @property
    def mix(self) -> str:
        """The lengths of sequences, in the form that `make_lengths` takes."""
        return self.lengths or f"equal:{self.sequence}"


def check_options(options: TrainBench) -> None:
    """Raise a one-line `UserError` for the first option that makes no sense."""
    for name in ("tokens", "sequence", "steps", "micro_batch_tokens"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if options.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {options.device}: auto, cpu or cuda")
    if options.compute_dtype not in ("", "float32", "bfloat16"):
        raise UserError(f"--compute-dtype {options.compute_dtype}: float32 or bfloat16")
    make_lengths(options.mix, 1, 0)


def draw_sequences(options: TrainBench) -> Lengths:
    """Return the lengths of a step's sequences. Their sum is `tokens` or a little more."""
    drawn = make_lengths(options.mix, options.tokens, options.seed)
    drawn = np.maximum(drawn, 2)
    return drawn[: int(np.searchsorted(drawn.cumsum(), options.tokens)) + 1]


def padded(lengths: Lengths, budget: int) -> Lengths:
    """Return the length to which each sequence is padded: that of the longest sequence in its micro-batch.

    Micro-batches are filled in the given order, up to `budget` tokens with padding.
    """
    found = np.zeros_like(lengths)
    start = 0
    for end in range(1, len(lengths) + 1):
        longest = int(lengths[start : end + 1].max())
        if end == len(lengths) or longest * (end + 1 - start) > budget:
            found[start:end] = lengths[start:end].max()
            start = end
    return found


def make_batch(lengths: Lengths, widths: Lengths, vocabulary: int, step: int, seed: int) -> Batch:
    """Return the batch of one step, with random tokens.

    Sequence i has `lengths[i]` tokens of its own, and `widths[i]` tokens with padding.
    """
    draw = np.random.default_rng([seed, step])
    total, own = int(widths.sum()), int((lengths - 1).sum())
    ends = widths.cumsum()
    place = np.arange(total) - np.repeat(ends - widths, widths)
    trained = place > np.repeat(widths - lengths, widths)
    return Batch(
        step=step,
        version=0,
        token_ids=draw.integers(0, vocabulary, total).astype(np.int32),
        lengths=widths.astype(np.int32),
        groups=np.arange(len(widths), dtype=np.int32),
        trained=trained,
        logprobs=np.where(trained, -np.log(vocabulary), 0).astype(np.float32),
        versions=np.zeros(total, np.int32),
        advantages=np.repeat(draw.standard_normal(len(widths)), widths).astype(np.float32),
        weights=np.where(trained, 1 / own, 0).astype(np.float32),
    )

"""What the training benchmark asks for: its options, checked before torch is loaded, and the batches that follow.

Every token but a sequence's first is trained. Padding is real work here: tokens before a sequence that are computed and
trained nowhere, as a trainer without packing has them.
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
    """Tokens of a step, padding not counted."""
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
        """How long sequences are, in one form."""
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
    """Lengths of the sequences of a step, of `tokens` in all or a little more."""
    drawn = make_lengths(options.mix, options.tokens, options.seed)
    drawn = np.maximum(drawn, 2)
    return drawn[: int(np.searchsorted(drawn.cumsum(), options.tokens)) + 1]


def padded(lengths: Lengths, budget: int) -> Lengths:
    """To which length each sequence is padded: the longest of its micro-batch, filled up in the order given."""
    found = np.zeros_like(lengths)
    start = 0
    for end in range(1, len(lengths) + 1):
        longest = int(lengths[start : end + 1].max())
        if end == len(lengths) or longest * (end + 1 - start) > budget:
            found[start:end] = lengths[start:end].max()
            start = end
    return found


def make_batch(lengths: Lengths, widths: Lengths, vocabulary: int, step: int, seed: int) -> Batch:
    """One step's batch of random tokens; sequence i has `lengths[i]` of its own, and `widths[i]` with padding."""
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

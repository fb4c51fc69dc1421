"""Forward and backward over a whole batch: afterwards the gradients are those of `sum(weights * token_loss)`.

How the batch is cut into rows, and over how many ranks, changes memory and speed, never the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs
from headrace.observe.spans import SpanRecorder
from headrace.training.logprobs import read_row
from headrace.training.packing import MicroBatch, passes, plan
from headrace.training.policies import FrozenPolicy
from headrace.training.ranks import Ranks
from headrace.training.reading import EntropyOf
from headrace.training.sharding import input_device, reduce_gradients
from headrace.types import Batch


@dataclass(frozen=True)
class Gradients:
    """What accumulating left to tell, beside the gradients on the parameters."""

    loss: float
    metrics: dict[str, float]
    """Means over the batch's trained tokens."""
    tokens: int
    micro_batches: int


def accumulate(
    model: Any,
    batch: Batch,
    loss: Loss,
    *,
    micro_batch_tokens: int,
    share_prefixes: bool,
    policies: Mapping[str, FrozenPolicy] | None = None,
    entropy: EntropyOf = "none",
    ranks: Ranks | None = None,
    compute_dtype: torch.dtype | None = None,
    spans: SpanRecorder | None = None,
) -> Gradients:
    """Add the batch's gradients to the model's parameters; what is told is of all ranks, and the same on all.

    `policies` are those that the loss wants to see the tokens scored by, by their names in `TokenInputs`: all of them
    before the first gradient. `compute_dtype` is that of a pass's matrix products, where it is not the weights' and no
    sharding sees to it.
    """
    rank, shares = (ranks.data, ranks.data_ranks) if ranks else (0, 1)
    rows = plan(batch, micro_batch_tokens=micro_batch_tokens, share_prefixes=share_prefixes, ranks=shares)
    mine = passes(rows, rank, shares) if ranks else [(row, True) for row in rows]
    with spans.span("score") if spans and policies else nullcontext(), deterministic():
        scores = {name: policy.logprobs([row for row, _ in mine], batch) for name, policy in (policies or {}).items()}
    total = 0.0
    sums: dict[str, float] = {}
    for number, (row, counts) in enumerate(mine):
        reduce_gradients(model, number + 1 == len(mine))
        others = {name: found[number] for name, found in scores.items()}
        with spans.span("train") if spans else nullcontext(), deterministic():
            row_loss, row_sums = _backward(model, batch, row, loss, others, entropy, compute_dtype, share=float(counts))
        total += row_loss * counts
        for name, value in row_sums.items():
            sums[name] = sums.get(name, 0.0) + value * counts
    if ranks:
        total, *values = ranks.sum_over_data([total, *sums.values()])
        sums = dict(zip(sums, values, strict=True))
    count = max(batch.trained_tokens, 1)
    return Gradients(
        loss=total,
        metrics={name: value / count for name, value in sums.items()},
        tokens=sum(len(row) for row in rows),
        micro_batches=len(rows),
    )


def _backward(
    model: Any,
    batch: Batch,
    row: MicroBatch,
    loss: Loss,
    others: Mapping[str, torch.Tensor],
    entropy: EntropyOf,
    compute_dtype: torch.dtype | None,
    *,
    share: float,
) -> tuple[float, dict[str, float]]:
    kept = None if batch.kept is None else batch.kept.at(row.sources)
    with torch.autocast(input_device(model).type, compute_dtype) if compute_dtype else nullcontext():
        readings = read_row(model, row, temperature=batch.temperature, kept=kept, entropy=entropy)
    logprobs = readings.logprobs

    def gathered(values: Any) -> torch.Tensor:
        return torch.from_numpy(values[row.sources]).to(logprobs)

    inputs = TokenInputs(
        logprobs=logprobs,
        behaviour=gathered(batch.logprobs),
        advantages=gathered(batch.advantages),
        sequences=torch.from_numpy(row.sequences).to(logprobs.device),
        lags=gathered(batch.version - batch.versions),
        entropy=readings.entropy,
        **{name: scored.to(logprobs) for name, scored in others.items()},
    )
    result = loss(inputs)
    total = (gathered(batch.weights) * result.values).sum()
    (total * share).backward()  # type: ignore[no-untyped-call]
    return float(total.detach()), {name: float(value) for name, value in result.sums.items()}


@contextmanager
def deterministic() -> Iterator[None]:
    """Equal inputs give equal bits: accumulation into shared places is ordered, whatever the number of threads."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling fresh memory finds bugs and costs time; it changes no result that is read.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill

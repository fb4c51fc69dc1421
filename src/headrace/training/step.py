"""Forward and backward over a whole batch: afterwards the gradients are those of `sum(weights * token_loss)`.

How the batch is cut into rows changes memory and speed, never the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs
from headrace.observe.spans import SpanRecorder
from headrace.training.logprobs import row_logprobs
from headrace.training.packing import MicroBatch, plan
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
    spans: SpanRecorder | None = None,
) -> Gradients:
    """Add the batch's gradients to the model's parameters."""
    rows = plan(batch, micro_batch_tokens=micro_batch_tokens, share_prefixes=share_prefixes)
    total = 0.0
    sums: dict[str, float] = {}
    for row in rows:
        with spans.span("train") if spans else nullcontext(), deterministic():
            row_loss, row_sums = _backward(model, batch, row, loss)
        total += row_loss
        for name, value in row_sums.items():
            sums[name] = sums.get(name, 0.0) + value
    count = max(batch.trained_tokens, 1)
    return Gradients(
        loss=total,
        metrics={name: value / count for name, value in sums.items()},
        tokens=sum(len(row) for row in rows),
        micro_batches=len(rows),
    )


def _backward(model: Any, batch: Batch, row: MicroBatch, loss: Loss) -> tuple[float, dict[str, float]]:
    logprobs = row_logprobs(model, row, temperature=batch.temperature)

    def gathered(values: Any) -> torch.Tensor:
        return torch.from_numpy(values[row.sources]).to(logprobs)

    inputs = TokenInputs(
        logprobs=logprobs,
        behaviour=gathered(batch.logprobs),
        advantages=gathered(batch.advantages),
        sequences=torch.from_numpy(row.sequences).to(logprobs.device),
        lags=gathered(batch.version - batch.versions),
    )
    result = loss(inputs)
    total = (gathered(batch.weights) * result.values).sum()
    total.backward()  # type: ignore[no-untyped-call]
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

"""Forward and backward over a whole batch: afterwards the gradients are those of `sum(weights * token_loss)`.

How the batch is cut into rows, and over how many ranks, changes memory and speed but never the gradient. Nothing here
waits for the device: loss and metrics stay on the device and are read once, at the end of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from headrace.algorithms.losses.base import Loss, TokenInputs
from headrace.observe.spans import SpanRecorder
from headrace.training.attention import PackedAttention
from headrace.training.devices import input_device, upload
from headrace.training.half import HalfWeights
from headrace.training.head.logprobs import EntropyOf, read_row
from headrace.training.policies import FrozenPolicy
from headrace.training.ranks.base import Ranks
from headrace.training.ranks.sharding import reduce_gradients
from headrace.training.routing import following
from headrace.training.rows.base import MicroBatch
from headrace.training.rows.packing import JOIN_COST, passes, plan
from headrace.types import Batch

LOSS = "loss"
REROUTED = "rerouted"
"""The metric for forced routing: the share of layers, per trained token, in which the record changed the router's
choice."""


@dataclass
class Gradients:
    """The results of `accumulate` beside the gradients on the parameters.

    The first read of `figures`, `loss` or `metrics` waits for the device and for the other ranks, so every rank must
    read.
    """

    sums: dict[str, torch.Tensor]
    """Sums over this rank's rows in float64: the loss under `LOSS`, and each metric summed over trained tokens."""
    trained_tokens: int
    tokens: int
    micro_batches: int
    ranks: Ranks | None = None

    @cached_property
    def figures(self) -> dict[str, float]:
        """The sums over the rows of all ranks, taken from the device and summed over the ranks at the first read."""
        if not self.sums:
            return {LOSS: 0.0}
        values = torch.stack(list(self.sums.values())).tolist()
        if self.ranks:
            values = self.ranks.sum_over_data(values)
        return dict(zip(self.sums, values, strict=True))

    @property
    def loss(self) -> float:
        """The loss of the batch."""
        return self.figures[LOSS]

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over the trained tokens of the batch."""
        count = max(self.trained_tokens, 1)
        return {name: value / count for name, value in self.figures.items() if name != LOSS}


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
    half: HalfWeights | None = None,
    dropout: Callable[[], AbstractContextManager[None]] = nullcontext,
    chunk_elements: int | None = None,
    spans: SpanRecorder | None = None,
) -> Gradients:
    """Add the batch's gradients to the model's parameters.

    The `figures` of the result cover the rows of all ranks, and are equal on all ranks.

    `policies` are the frozen policies that the loss needs, by their names in `TokenInputs`. They score all rows before
    the first gradient is computed. `half` holds the master weights, where the passes use a narrower copy: the masters
    then get the gradients. `dropout` is active while gradients are computed, and not while policies score.
    `chunk_elements` limits how many logits exist at once.
    """
    rank, shares = (ranks.data, ranks.data_ranks) if ranks else (0, 1)
    on_host = input_device(model).type == "cpu"
    rows = plan(
        batch,
        micro_batch_tokens=micro_batch_tokens,
        share_prefixes=share_prefixes,
        ranks=shares,
        join_cost=0.0 if on_host else JOIN_COST,
    )
    mine = passes(rows, rank, shares) if ranks else [(row, True) for row in rows]
    ordered = deterministic if on_host else nullcontext
    with spans.span("score") if spans and policies else nullcontext(), ordered():
        scores = {name: policy.logprobs([row for row, _ in mine], batch) for name, policy in (policies or {}).items()}
    sums: dict[str, torch.Tensor] = {}
    with dropout():
        # A row does not count if it is only computed again to keep this rank in step with the others; see `passes`.
        for number, (row, counts) in enumerate(mine):
            reduce_gradients(model, number + 1 == len(mine))
            others = {name: found[number] for name, found in scores.items()}
            with spans.span("train") if spans else nullcontext(), ordered():
                with following(model, row) as forced:
                    found = _backward(model, batch, row, loss, others, entropy, chunk_elements, share=float(counts))
                if forced is not None:
                    # A position that predicts the first token of several answers counts once for each answer.
                    found[REROUTED] = forced.changed(upload(row.predictors, input_device(model))) / forced.layers
            if half is not None:
                half.collect()
            for name, value in found.items():
                value = value.detach().double() * counts
                sums[name] = sums[name] + value if name in sums else value
    return Gradients(
        sums=sums,
        trained_tokens=batch.trained_tokens,
        tokens=sum(len(row) for row in rows),
        micro_batches=len(rows),
        ranks=ranks,
    )


def _backward(
    model: Any,
    batch: Batch,
    row: MicroBatch,
    loss: Loss,
    others: Mapping[str, torch.Tensor],
    entropy: EntropyOf,
    chunk_elements: int | None,
    *,
    share: float,
) -> dict[str, torch.Tensor]:
    """Run one row forward and backward, and return its loss and the sums of its metrics.

    `share` is the factor on the gradient: 1, or 0 for a row that does not count. The backward pass runs in both cases,
    because the other ranks wait for this rank in it. The returned values are not multiplied by `share`.
    """
    kept = None if batch.kept is None else batch.kept.at(row.sources)
    attention = PackedAttention(row)
    readings = read_row(
        model,
        row,
        temperature=batch.temperature,
        kept=kept,
        entropy=entropy,
        attention=attention,
        chunk_elements=chunk_elements,
    )
    logprobs = readings.logprobs

    def gathered(values: Any) -> torch.Tensor:
        return upload(values[row.sources], logprobs.device, logprobs.dtype)

    inputs = TokenInputs(
        logprobs=logprobs,
        behaviour=gathered(batch.logprobs),
        advantages=gathered(batch.advantages),
        sequences=upload(row.sequences, logprobs.device),
        lags=gathered(batch.token_lags()),
        entropy=readings.entropy,
        **{name: scored.to(logprobs) for name, scored in others.items()},
    )
    result = loss(inputs)
    total = (gathered(batch.weights) * result.values).sum()
    (total * share).backward()  # type: ignore[no-untyped-call]
    # The attention context must live until here, because compiled layers look it up in their backward pass.
    del attention
    return {LOSS: total, **result.sums}


@contextmanager
def deterministic() -> Iterator[None]:
    """Make equal inputs give equal bits inside this context, whatever the number of threads.

    Accumulation into shared memory is then done in a fixed order.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling new memory finds bugs but costs time. It changes no result that is read.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill

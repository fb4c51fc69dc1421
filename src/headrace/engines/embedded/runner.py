"""The host's runner: it computes a plan at once with plain torch. CPUs use it, and it is the GPU runner's reference."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.engines.embedded.attention import DenseContext, PagedContext
from headrace.engines.embedded.base import Runner, Timings
from headrace.engines.embedded.kv_cache import KVCache
from headrace.engines.embedded.sampler import draw
from headrace.engines.embedded.scheduler import Chunk, StepPlan
from headrace.engines.embedded.sequence import Sampled, Sequence
from headrace.models.attention import AttentionContext, attending
from headrace.models.experts import RoutingRecorder, RoutingShape, recording
from headrace.models.prepack import PackedLinears, can_pack, small_products
from headrace.types import Float32Array, Int32Array


class HostRunner(Runner):
    """A `Runner` that computes each plan in one pass over packed tokens, and returns its tokens at once."""

    def __init__(self, model: Any, cache: KVCache, routing: RoutingShape | None = None) -> None:
        self.prefill_chunk = 512
        self.gather = 0
        self.overlaps = False
        self.timings = Timings()
        self._model = model
        self._cache = cache
        self._routing = routing
        self._device: torch.device = next(model.parameters()).device
        self._packed = PackedLinears(model) if can_pack(model) else None

    @torch.inference_mode()
    def run(self, plan: StepPlan, version: int) -> list[Sampled]:
        """Compute the plan's chunks. Return a token for each sequence whose last token is among them."""
        started = time.perf_counter()
        self._cache.copy(plan.copies)
        context = PagedContext(self._cache, plan.chunks, self._device)
        ends = np.cumsum([chunk.count for chunk in context.rows]) - 1
        sampled = [(chunk.sequence, int(end)) for chunk, end in zip(context.rows, ends, strict=True) if chunk.samples]
        # A pass that samples nothing still projects one token, because some models take an empty selection as "all".
        keep = [end for _, end in sampled] or [0]
        recorder = RoutingRecorder(self._routing, int(ends[-1]) + 1, self._device) if self._routing else None
        with recording(recorder):
            logits = self._forward(context, _token_ids(context.rows), _positions(context.rows), keep)
        drawn = _draw([sequence for sequence, _ in sampled], logits, version, recorder, keep) if sampled else []
        self.timings.steps += 1
        self.timings.host_seconds += time.perf_counter() - started
        return drawn

    @torch.inference_mode()
    def clear(self, blocks: Seq[int]) -> None:
        """Zero these blocks of the cache. Stale slots are read with weight 0, so they must be finite."""
        self._cache.clear(blocks)

    @torch.inference_mode()
    def score(self, token_ids: Int32Array, *, again: bool = False) -> ReadyScores:
        """See `Runner.score`. There is nothing to prepare."""
        ids = torch.from_numpy(np.array(token_ids, np.int64)).to(self._device)
        return ReadyScores(score_ids(self._model, ids).cpu())

    def _forward(
        self,
        context: AttentionContext,
        token_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
        positions: np.ndarray[tuple[int], np.dtype[np.int64]],
        keep: Seq[int],
    ) -> torch.Tensor:
        with attending(context), small_products() if self._packed is not None else nullcontext():
            output = self._model(
                input_ids=torch.from_numpy(token_ids).to(self._device)[None],
                position_ids=torch.from_numpy(positions).to(self._device)[None],
                use_cache=False,
                logits_to_keep=torch.tensor(keep, device=self._device),
            )
        logits: torch.Tensor = output.logits[0]
        return logits


@dataclass(frozen=True)
class ReadyScores:
    """Log-probabilities that are already computed."""

    logprobs: torch.Tensor

    def ready(self) -> bool:
        """See `PendingScores.ready`."""
        return True

    def result(self) -> Float32Array:
        """See `PendingScores.result`."""
        return np.asarray(self.logprobs.numpy(), np.float32)


def score_ids(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of tokens 1..n given their prefix ([n - 1]). `ids` must be on the model's device."""
    if len(ids) < 2:
        return torch.zeros(0, device=ids.device)
    positions = torch.arange(len(ids) - 1, device=ids.device)
    with attending(DenseContext()):
        logits = model(input_ids=ids[None, :-1], position_ids=positions[None], use_cache=False).logits[0]
    logits = logits.float()
    scored: torch.Tensor = logits.gather(1, ids[1:, None])[:, 0] - logits.logsumexp(-1)
    return scored


def _draw(
    sequences: list[Sequence], logits: torch.Tensor, version: int, recorder: RoutingRecorder | None, ends: Seq[int]
) -> list[Sampled]:
    drawn = draw(logits, [s.sampling for s in sequences], [len(s.tokens) for s in sequences])
    kept = drawn.kept
    routing = None if recorder is None else recorder.chosen[torch.tensor(ends)].cpu().numpy()
    return [
        Sampled(
            sequence,
            [token],
            [logprob],
            [version],
            math.isfinite(logprob),
            None if (ids := kept[row]) is None else [ids],
            None if routing is None else [routing[row]],
        )
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, drawn.tokens.tolist(), drawn.logprobs.tolist(), strict=True)
        )
    ]


def _token_ids(chunks: Seq[Chunk]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.count]], np.int64)


def _positions(chunks: Seq[Chunk]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])

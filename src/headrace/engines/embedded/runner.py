"""The model runner: chunks in, logits out. Only the rows that are sampled from reach the vocabulary projection."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from headrace.engines.embedded.attention import DenseContext, PagedContext
from headrace.engines.embedded.kv_cache import KVCache
from headrace.engines.embedded.scheduler import Chunk, Plan
from headrace.engines.embedded.sequence import Sequence
from headrace.models.attention import AttentionContext, attending
from headrace.types import Float32Array, Int32Array


class ModelRunner:
    """Runs one model over packed rows against one cache."""

    def __init__(self, model: Any, cache: KVCache) -> None:
        self._model = model
        self._cache = cache
        self._device: torch.device = next(model.parameters()).device

    @torch.inference_mode()
    def run(self, plan: Plan) -> tuple[list[Sequence], torch.Tensor]:
        """Compute the plan's chunks; the sequences that get a token now, and their logits [R, V]."""
        self._cache.copy(plan.copies)
        context = PagedContext(self._cache, plan.chunks, self._device)
        ends = np.cumsum([chunk.count for chunk in context.rows]) - 1
        sampled = [(chunk.sequence, int(end)) for chunk, end in zip(context.rows, ends, strict=True) if chunk.samples]
        # A pass without sampled rows still projects one: an empty selection would mean "all" to some models.
        keep = [end for _, end in sampled] or [0]
        logits = self._forward(context, _token_ids(context.rows), _positions(context.rows), keep)
        return [sequence for sequence, _ in sampled], logits

    @torch.inference_mode()
    def clear(self, blocks: Seq[int]) -> None:
        """Zero these blocks of the cache."""
        self._cache.clear(blocks)

    @torch.inference_mode()
    def score(self, token_ids: Int32Array) -> Float32Array:
        """Log-probabilities of tokens 1..n given their prefix, untempered, without the cache."""
        ids = np.asarray(token_ids, np.int64)
        if len(ids) < 2:
            return np.zeros(0, np.float32)
        logits = self._forward(DenseContext(), ids[:-1], np.arange(len(ids) - 1), range(len(ids) - 1))
        logprobs = torch.log_softmax(logits.float(), -1)
        chosen = logprobs.gather(1, torch.from_numpy(ids[1:]).to(self._device)[:, None])[:, 0]
        return np.asarray(chosen.cpu().numpy(), np.float32)

    def _forward(
        self,
        context: AttentionContext,
        token_ids: np.ndarray[tuple[int], np.dtype[np.int64]],
        positions: np.ndarray[tuple[int], np.dtype[np.int64]],
        keep: Seq[int],
    ) -> torch.Tensor:
        with attending(context):
            output = self._model(
                input_ids=torch.from_numpy(token_ids).to(self._device)[None],
                position_ids=torch.from_numpy(positions).to(self._device)[None],
                use_cache=False,
                logits_to_keep=torch.tensor(keep, device=self._device),
            )
        logits: torch.Tensor = output.logits[0]
        return logits


def _token_ids(chunks: Seq[Chunk]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.count]], np.int64)


def _positions(chunks: Seq[Chunk]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([np.arange(c.start, c.start + c.count) for c in chunks])

"""The peers of the engine: Hugging Face's own ways to generate, with the same prompts, parameters and process.

Only tokens that were asked for count. For a peer that cannot run here, the figures hold the reason instead.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from headrace.bench.engine_rounds import Work
from headrace.bench.timing import Timed

DEADLINE = 1800.0
_PAGE = 256
_ROOM, _SPARE_PAGES = 1.3, 8
_MOST_BATCH_TOKENS = 8192
"""The largest batch of transformers if memory suffices."""


class PeerError(Exception):
    """A peer did not generate what it was asked for. The text says why."""


def bench_peer(name: str, twin: Any, work: Work, batch: int, device: str) -> dict[str, Any]:
    """Return the tokens per second of a peer, or the reason why it did not run."""
    run = _padded_generate if name == "generate" else _continuous_batching
    try:
        seconds = run(twin, work, batch, device)
    except (PeerError, ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        return {"ran": False, "why": f"{type(error).__name__}: {reason}"}
    return {"ran": True, "seconds": seconds, "tokens": work.tokens, "tokens_per_second": work.tokens / seconds}


def _settings(work: Work, tokens: int) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        temperature=work.sampling.temperature,
        top_p=work.sampling.top_p,
        top_k=work.sampling.top_k,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )


def _padded_generate(twin: Any, work: Work, batch: int, device: str) -> float:
    """Return the seconds of `generate` on batches in the order of the requests.

    Each batch runs until its longest answer is complete.
    """
    # The model's own generation settings (end tokens, penalties) would change the work.
    twin.generation_config = _settings(work, 1)
    _generate_batch(twin, work, range(min(batch, len(work.prompts))), 4)
    with Timed(device) as timed:
        for first in range(0, len(work.prompts), batch):
            rows = range(first, min(first + batch, len(work.prompts)))
            _generate_batch(twin, work, rows, max(work.lengths[row] for row in rows))
    return timed.seconds


@torch.inference_mode()
def _generate_batch(twin: Any, work: Work, rows: range, tokens: int) -> None:
    ids = torch.from_numpy(np.stack([work.prompts[row] for row in rows]).astype(np.int64)).to(twin.device)
    out = twin.generate(ids, attention_mask=torch.ones_like(ids), generation_config=_settings(work, tokens))
    if out.shape[1] != ids.shape[1] + tokens:
        raise PeerError(f"generate gave {out.shape[1] - ids.shape[1]} of {tokens} tokens")


def _continuous_batching(twin: Any, work: Work, batch: int, device: str) -> float:
    """Return the seconds of the continuous batching of transformers, with log-probabilities if it can give them."""
    config = _batching_config(work, batch)
    settings = _settings(work, max(work.lengths))
    settings.eos_token_id = -1
    with twin.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config, timeout=60
    ) as manager:
        _serve(manager, work.warm_up(), "warm")
        with Timed(device) as timed:
            _serve(manager, work, "run")
    return timed.seconds


def _batching_config(work: Work, batch: int) -> Any:
    """Return a configuration with a cache that fits this work.

    By default the cache takes most of the memory, and the attention reads masks over the whole cache.
    """
    from transformers import ContinuousBatchingConfig

    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page = int(getattr(ContinuousBatchingConfig(), "page_size", None) or _PAGE)
    pages = sorted((-(-(len(p) + n) // page) for p, n in zip(work.prompts, work.lengths, strict=True)), reverse=True)
    wanted = {
        "return_logprobs": True,
        "max_requests_per_batch": batch,
        # It admits no request while too few of its pages are free.
        "num_blocks": int(sum(pages[:batch]) * _ROOM) + _SPARE_PAGES,
        "max_batch_tokens": min(_MOST_BATCH_TOKENS, max(batch, sum(len(prompt) for prompt in work.prompts))),
    }
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})


def _serve(manager: Any, work: Work, name: str) -> None:
    wanted = {f"{name}-{i}": length for i, length in enumerate(work.lengths)}
    for (request_id, length), prompt in zip(wanted.items(), work.prompts, strict=True):
        manager.add_request(prompt.tolist(), request_id=request_id, max_new_tokens=length)
    deadline = time.monotonic() + DEADLINE
    while wanted:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise PeerError("its generation thread ended")
            if time.monotonic() > deadline:
                raise PeerError(f"it was not done within {DEADLINE:g} s")
        elif result.error is not None:
            raise PeerError(result.error)
        elif result.is_finished():
            length = wanted.pop(result.request_id)
            if len(result.generated_tokens) != length:
                raise PeerError(f"it gave {len(result.generated_tokens)} of {length} tokens")

"""Alternatives to a running request, from a token of it on: ordinary requests that name it as their parent.

A fork is a function of the request, the tokens and the place alone, so the same fork asked for twice is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np

from headrace.engines.base import Request
from headrace.errors import UserError

_MASK = (1 << 64) - 1


def fork_requests(request: Request, tokens: Sequence[int], at: int, n: int) -> list[Request]:
    """`n` requests that go on after the first `at` of the request's `tokens` (its prompt and what was sampled).

    Their ids are `<id>/fork<at>.0` and so on, their seeds differ, and tokens that were sampled before `at` count
    against `max_tokens`. They are a group: what cannot be taken over from the parent is computed once for all of them.
    """
    left = request.sampling.max_tokens - max(0, at - len(request.token_ids))
    if n < 1:
        raise UserError(f"fork of request {request.id}: {n} alternatives were asked for; at least 1 is needed")
    if not 1 <= at <= len(tokens):
        raise UserError(f"fork of request {request.id}: token {at} is not among its tokens 1 to {len(tokens)}")
    if left < 1:
        raise UserError(f"fork of request {request.id}: its max_tokens leaves nothing to sample after token {at}")
    prompt = np.array(tokens[:at], np.int32)
    return [
        msgspec.structs.replace(
            request,
            id=f"{request.id}/fork{at}.{k}",
            token_ids=prompt,
            sampling=msgspec.structs.replace(
                request.sampling, max_tokens=left, seed=_derived_seed(request.sampling.seed, k)
            ),
            group=request.group or f"{request.id}/fork",
            parent=request.id,
        )
        for k in range(n)
    ]


def _derived_seed(seed: int, k: int) -> int:
    """A seed of 63 bits: it fits into a signed word on any device."""
    words = (seed & _MASK).to_bytes(8, "little") + k.to_bytes(8, "little")
    return int.from_bytes(blake2b(words, digest_size=8, person=b"fork").digest(), "little") >> 1

"""Forks of a running request: ordinary requests that continue it from one of its tokens and name it as their parent.

A fork depends only on the request, its tokens and the position. So asking twice for the same fork gives the same
requests.
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
    """Return `n` requests that continue after the first `at` of `tokens`, the request's prompt and sampled tokens.

    The ids of the new requests are `<id>/fork<at>.0`, `<id>/fork<at>.1` and so on. Their seeds differ. Tokens that were
    sampled before `at` count against `max_tokens`. The new requests form a group, so a prefix that cannot be taken over
    from the parent is computed once for all of them.
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
    """Return a seed of 63 bits, which fits into a signed 64-bit integer on any device."""
    words = (seed & _MASK).to_bytes(8, "little") + k.to_bytes(8, "little")
    return int.from_bytes(blake2b(words, digest_size=8, person=b"fork").digest(), "little") >> 1

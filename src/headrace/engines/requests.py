"""The rules about requests that are the same in every engine.

They say which requests are refused, where they stop, how they are forked, and what noise draws their tokens.

A fork is an ordinary request that continues a running request from one of its tokens and names it as its parent. A fork
depends only on the request, its tokens and the position. So asking twice for the same fork gives the same requests.
"""

from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.engines.base import FORBIDDEN_LIMIT, Request, Sampling
from headrace.errors import UserError
from headrace.types import splitmix64

_MASK = (1 << 64) - 1


def request_refusal(request: Request, vocabulary: int, max_length: int) -> str:
    """Return why this request cannot be served, or an empty string if it can."""
    ids = request.token_ids
    if len(ids) == 0:
        return "its prompt has no tokens"
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"its prompt holds a token id outside of the vocabulary of {vocabulary}"
    if len(ids) >= max_length:
        return f"its prompt of {len(ids)} tokens leaves no room under the longest length of {max_length}"
    return sampling_refusal(request.sampling, vocabulary)


def sampling_refusal(sampling: Sampling, vocabulary: int) -> str:
    """Return why these settings cannot be used, or an empty string if they can."""
    positive = sampling.max_tokens >= 1 and sampling.temperature >= 0 and sampling.top_k >= 0
    if not (positive and 0 < sampling.top_p <= 1):
        return "sampling needs max_tokens >= 1, temperature >= 0, top_k >= 0 and 0 < top_p <= 1"
    if not 0 <= sampling.min_p <= 1:
        return "sampling needs 0 <= min_p <= 1"
    if any(not stop for stop in sampling.stop_sequences):
        return "a stop sequence has no tokens"
    if len(sampling.forbidden) > FORBIDDEN_LIMIT or len(set(sampling.forbidden)) >= vocabulary:
        return f"more than {FORBIDDEN_LIMIT} tokens are forbidden, or all of them"
    return ""


def first_stop(new: Sequence[int], sampling: Sampling, before: Sequence[int], sampled: int) -> int | None:
    """Return the number of `new` tokens up to and including the first stop, or None if there is no stop.

    The new tokens follow the tokens `before`, of which the last `sampled` were sampled. A stop sequence may begin among
    those, but not in the prompt.
    """
    stops = sampling.stop_token_ids
    for i in range(len(new)):
        if new[i] in stops or any(_ends_with(new, i, stop, before, sampled) for stop in sampling.stop_sequences):
            return i + 1
    return None


def _ends_with(new: Sequence[int], last: int, stop: tuple[int, ...], before: Sequence[int], sampled: int) -> bool:
    """Return whether the sampled tokens, up to the new token with index `last`, end with `stop`."""
    fresh = new[max(0, last + 1 - len(stop)) : last + 1]
    wanted = len(stop) - len(fresh)
    if wanted > sampled or tuple(fresh) != stop[wanted:]:
        return False
    return not wanted or tuple(before[-wanted:]) == stop[:wanted]


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


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """Hash each (seed, position) to a number in [0, 1)."""
    seed = np.array([s & _MASK for s in seeds], np.uint64)
    position = np.array(positions, np.uint64)
    # 52 bits: the largest number is far enough below 1 that its product with a mass is less than the mass.
    return (splitmix64(splitmix64(seed) ^ position) >> np.uint64(12)).astype(np.float64) * 2.0**-52

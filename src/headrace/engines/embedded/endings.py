"""Decides where a sequence ends, and which requests cannot be served."""

from __future__ import annotations

import math

from headrace.engines.base import Request, sampling_refusal
from headrace.engines.embedded.sequence import Ending, Sampled


def ending(new: Sampled) -> Ending | None:
    """Return where the sequence ends among its new tokens, or None if it continues.

    A sequence ends at its first stop, at a log-probability that is not finite, or at its length limit.
    """
    sequence, sampling = new.sequence, new.sequence.sampling
    room, count = sequence.limit - len(sequence.tokens), len(new.tokens)
    stops = bool(sampling.stop_token_ids or sampling.stop_sequences)
    if count < room and new.sound and not stops:
        return None
    count = min(count, room)
    broken = count if new.sound else next((i for i in range(count) if not math.isfinite(new.logprobs[i])), count)
    stop = _first_stop(new, broken) if stops else None
    if stop is not None:
        return Ending("stop", stop + 1, version=new.versions[stop])
    if broken < count:
        where = f"position {len(sequence.tokens) + broken} under version {new.versions[broken]}"
        error = f"request {sequence.id}: the logits are not finite at {where}"
        return Ending("failed", broken, error, new.versions[broken])
    return Ending("length", room, version=new.versions[room - 1]) if len(new.tokens) >= room else None


def refusal(request: Request, vocabulary: int, max_length: int) -> str:
    """Return why this request cannot be served, or an empty string if it can."""
    ids = request.token_ids
    if len(ids) == 0:
        return "its prompt has no tokens"
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"its prompt holds a token id outside of the vocabulary of {vocabulary}"
    if len(ids) >= max_length:
        return f"its prompt of {len(ids)} tokens leaves no room under the longest length of {max_length}"
    return sampling_refusal(request.sampling, vocabulary)


def _first_stop(new: Sampled, count: int) -> int | None:
    sampling = new.sequence.sampling
    stops = sampling.stop_token_ids
    for i in range(count):
        if new.tokens[i] in stops or any(_ends_with(new, i, stop) for stop in sampling.stop_sequences):
            return i
    return None


def _ends_with(new: Sampled, last: int, stop: tuple[int, ...]) -> bool:
    """Return whether the sampled tokens, up to the new token with index `last`, end with `stop`."""
    fresh = new.tokens[max(0, last + 1 - len(stop)) : last + 1]
    wanted = len(stop) - len(fresh)
    if wanted > new.sequence.sampled or tuple(fresh) != stop[wanted:]:
        return False
    return not wanted or tuple(new.sequence.tokens[-wanted:]) == stop[:wanted]

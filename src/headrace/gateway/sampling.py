"""One turn, sampled with as many engine requests as it needs: an aborted request is resumed from its prefix."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import numpy as np

from headrace.engines.base import Delta, Request, Sampler, closing_deltas
from headrace.errors import HeadraceError

FRUITLESS_RESUMES = 100
"""After this many aborts in a row without a token between them, the turn fails."""


class EngineFailure(Exception):
    """The engines could not answer. The text says why, in one line."""


async def sample(engine: Sampler, request: Request) -> AsyncGenerator[Delta]:
    """Yield the deltas of a turn. The last one has `finish` "stop" or "length". Raises `EngineFailure`."""
    limit = request.sampling.max_tokens
    token_ids = request.token_ids
    attempt = sampled = fruitless = 0
    while True:
        before = sampled
        asked = msgspec.structs.replace(
            request,
            id=f"{request.id}/{attempt}",
            token_ids=token_ids,
            sampling=msgspec.structs.replace(request.sampling, max_tokens=limit - sampled),
        )
        attempt += 1
        # Closing this iterator early must also close the engine's iterator, which aborts the request in the engine.
        async with aclosing(_deltas(engine, asked)) as deltas:
            async for delta in deltas:
                sampled += len(delta.token_ids)
                token_ids = np.concatenate([token_ids, np.asarray(delta.token_ids, np.int32)])
                if delta.finish == "aborted":
                    delta = msgspec.structs.replace(delta, finish="length" if sampled == limit else None)
                yield delta
                if delta.finish is not None:
                    return
        fruitless = fruitless + 1 if sampled == before else 0
        if fruitless > FRUITLESS_RESUMES:
            raise EngineFailure(f"{engine.name} aborted {fruitless} times in a row without a token")


async def _deltas(engine: Sampler, request: Request) -> AsyncGenerator[Delta]:
    """Yield the deltas of one request up to its finish. Raises `EngineFailure` if the request fails."""
    finished = False
    try:
        async with closing_deltas(engine.generate(request)) as deltas:
            async for delta in deltas:
                if delta.finish == "failed":
                    raise EngineFailure(f"{engine.name}: {delta.error or 'failed without a reason'}")
                finished = delta.finish is not None
                yield delta
                if finished:
                    return
    except HeadraceError as error:
        raise EngineFailure(f"{engine.name}: {error}") from error
    raise EngineFailure(f"{engine.name}: the stream ended without a finish")

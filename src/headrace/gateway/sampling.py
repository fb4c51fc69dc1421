"""One turn at the engines, over as many requests as it takes: an aborted one is resumed by its prefix."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import numpy as np

from headrace.engines.base import Delta, Request, Sampler, closing_deltas
from headrace.errors import HeadraceError

FRUITLESS_RESUMES = 100
"""Aborts in a row without a token between them, after which the engine is not asked again."""


class EngineFailure(Exception):
    """The engines could not answer; the text says why, in one line."""


async def sample(engine: Sampler, request: Request) -> AsyncGenerator[Delta]:
    """The deltas of a turn; the last has `finish` "stop" or "length". Raises `EngineFailure`."""
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
        # Closing this iterator early must close the engine's too: that is what aborts the request there.
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
    """The deltas of one request up to its finish, whatever it is but a failure."""
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

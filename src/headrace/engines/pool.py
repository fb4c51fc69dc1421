"""Several engines as one: requests go where they are served soonest, weights go everywhere.

A group stays on one engine, where its prompt is computed once, and a fork goes where its parent runs. An engine that
is quarantined or behind the version that the pool has proved gets no new request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Engine, EngineStats, Request, closing_deltas, failed_delta
from headrace.errors import HeadraceError
from headrace.types import Float32Array, Int32Array


class EnginePool:
    """Implements `Engine` over its members."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.name = "pool"
        self.engines = list(engines)
        self._proved = {engine.name: -1 for engine in engines}
        self._open: dict[str, Engine] = {}
        self._running: Counter[str] = Counter()
        self._home: dict[str, str] = {}
        self._members: Counter[str] = Counter()

    @property
    def version(self) -> int:
        """The newest version that every serving engine has proved; -1 when none serves."""
        serving = [version for version in self._proved.values() if version >= 0]
        return min(serving) if serving else -1

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """See `Engine.generate`."""
        if request.id in self._open:
            yield failed_delta(request.id, f"a request with id {request.id!r} is already running")
            return
        engine = self._choose(request)
        self._open[request.id] = engine
        self._running[engine.name] += 1
        self._members[request.group] += 1
        try:
            # Closing this iterator early must close the engine's too: that is what aborts the request there.
            async with closing_deltas(engine.generate(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            del self._open[request.id]
            self._running[engine.name] -= 1
            self._members[request.group] -= 1
            if not self._members[request.group]:
                del self._members[request.group]
                self._home.pop(request.group, None)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests wherever they run."""
        await asyncio.gather(*(engine.abort(ids) for engine in self.engines))

    async def pause(self) -> None:
        """Pause all engines."""
        await asyncio.gather(*(engine.pause() for engine in self.engines))

    async def resume(self) -> None:
        """Resume all engines."""
        await asyncio.gather(*(engine.resume() for engine in self.engines))

    async def load_all(self, manifest: Manifest) -> list[Proof]:
        """Load on every engine at once; what each has proved decides whether it serves."""
        proofs = await asyncio.gather(*(engine.load(manifest) for engine in self.engines))
        for engine, proof in zip(self.engines, proofs, strict=True):
            if proof.accepted:
                self._proved[engine.name] = proof.version
            elif proof.quarantined:
                self._proved[engine.name] = -1
        return proofs

    async def load(self, manifest: Manifest) -> Proof:
        """Load on every engine; the first refusal, if there is one, speaks for the pool."""
        proofs = await self.load_all(manifest)
        return next((proof for proof in proofs if not proof.accepted), proofs[0])

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Score on the least loaded engine."""
        return await self._least_loaded().score(token_ids)

    async def stats(self) -> EngineStats:
        """The sum over the engines, at the pool's version."""
        each = await asyncio.gather(*(engine.stats() for engine in self.engines))
        return EngineStats(
            version=self.version,
            running=sum(stats.running for stats in each),
            waiting=sum(stats.waiting for stats in each),
            generated_tokens=sum(stats.generated_tokens for stats in each),
            prefilled_tokens=sum(stats.prefilled_tokens for stats in each),
            preemptions=sum(stats.preemptions for stats in each),
            free_blocks=sum(stats.free_blocks for stats in each),
            total_blocks=sum(stats.total_blocks for stats in each),
        )

    async def close(self) -> None:
        """Close all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _choose(self, request: Request) -> Engine:
        serving = self._serving()
        parent = self._open.get(request.parent)
        if parent in serving:
            return parent
        home = self._home.get(request.group) if request.group else None
        for engine in serving:
            if engine.name == home:
                return engine
        best = self._least_loaded()
        if request.group:
            self._home[request.group] = best.name
        return best

    def _least_loaded(self) -> Engine:
        return min(self._serving(), key=lambda engine: self._running[engine.name])

    def _serving(self) -> list[Engine]:
        newest = max(self._proved.values())
        serving = [engine for engine in self.engines if self._proved[engine.name] == newest]
        if not serving:
            raise HeadraceError("no engine serves: none has proved its weights")
        return serving

"""The engine pool: it makes several engines look like one and sends each request to the least loaded engine.

A group stays on one engine, so that its prompt is computed once, and a fork goes to the engine of its parent. An engine
gets no new requests while it is away, in quarantine, or behind the version that the pool has declared. When an engine
is lost, its requests end as aborted, so that they can be resumed from their prefix on another engine.

Engines can be held at one version, for an evaluation. They take no other version until they are freed, and requests
that name the version go to them alone.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence

import msgspec

from headrace.delivery.base import Proof
from headrace.engines.base import Delta, Engine, Request, closing_deltas, failed_delta, token_delta
from headrace.errors import HeadraceError, UserError
from headrace.types import NO_VERSION, Float32Array, Int32Array


class EnginePool:
    """A `Sampler` over several engines. The pool does not deliver weights: each engine gets them separately."""

    def __init__(self, engines: Sequence[Engine], *, patience: float = 300.0) -> None:
        """Make a pool of these engines. A request waits at most `patience` seconds for an engine that serves."""
        self.name = "pool"
        self.engines = list(engines)
        self.floor = NO_VERSION
        """The declared version. Only engines that have proved this version or a newer one get new requests."""
        self._patience = patience
        self._proved = {engine.name: NO_VERSION for engine in engines}
        self._refused: dict[str, int] = {}
        self._away: dict[str, str] = {}
        self._retired: set[str] = set()
        self._lives: Counter[str] = Counter()
        """The number of times each engine was lost. All requests that it got before the last loss have ended."""
        self._open: dict[str, Engine] = {}
        self._unplaced: set[str] = set()
        """The ids of requests that wait for an engine that serves."""
        self._running: Counter[str] = Counter()
        self._home: dict[str, str] = {}
        self._members: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._held: dict[str, int] = {}

    def proved(self, name: str) -> int:
        """Return the version that this engine has proved: -1 before the first, in quarantine, and while it is away."""
        return self._proved[name]

    def refused(self, name: str) -> int:
        """Return the version that this engine finally refused to load; -1 if there is none."""
        return self._refused.get(name, NO_VERSION)

    def refuse(self, name: str, version: int) -> None:
        """Record that this engine refused this version and is not sent it again. `lose` clears the record."""
        self._refused[name] = version

    def away(self, name: str) -> bool:
        """Return whether this engine was lost and has not come back."""
        return name in self._away

    def hold(self, names: Iterable[str], version: int) -> None:
        """Hold these engines at this version, which they have proved, until `free` is called or they are lost."""
        self._held = dict.fromkeys(names, version)
        self._ring()

    def free(self) -> None:
        """End the hold. Every engine may take the newest version again."""
        self._held = {}

    def held(self, name: str) -> bool:
        """Return whether this engine is held at its version."""
        return name in self._held

    @property
    def holding(self) -> int:
        """The number of engines that are held at a version."""
        return len(self._held)

    @property
    def present(self) -> list[Engine]:
        """The engines that are not away."""
        return [engine for engine in self.engines if engine.name not in self._away]

    @property
    def running(self) -> dict[str, int]:
        """The number of running requests of each engine that is not away."""
        return {engine.name: self._running[engine.name] for engine in self.present}

    @property
    def waiting(self) -> int:
        """The number of requests that wait for an engine that serves."""
        return len(self._unplaced)

    def requests(self, name: str) -> int:
        """Return the number of running requests of this engine, also while it is away."""
        return self._running[name]

    def add(self, engine: Engine) -> None:
        """Add an engine to the pool. It gets requests once it has proved its weights."""
        self.engines = [*self.engines, engine]
        self._proved[engine.name] = NO_VERSION

    def retire(self, name: str, reason: str) -> None:
        """Mark an engine as lost for good, because it leaves the pool."""
        self._retired.add(name)
        self.lose(name, reason)

    def remove(self, name: str) -> None:
        """Remove an engine that was retired from the pool."""
        self.engines = [engine for engine in self.engines if engine.name != name]
        self._retired.discard(name)
        self._refused.pop(name, None)
        del self._away[name], self._proved[name]

    def lose(self, name: str, reason: str) -> None:
        """Mark an engine as lost. Its requests end as aborted. It gets no new ones until it has proved its weights."""
        self._away[name] = reason
        self._lives[name] += 1
        self._proved[name] = NO_VERSION
        self._refused.pop(name, None)
        self._held.pop(name, None)
        self._home = {group: home for group, home in self._home.items() if home != name}

    def take_back(self, name: str) -> None:
        """Mark a lost engine as back. It has no proved weights yet. One that was retired does not come back."""
        if name not in self._retired:
            self._away.pop(name, None)

    def loaded(self, proof: Proof) -> None:
        """Record the result of a load, which decides whether the engine serves. One that has left does not."""
        if proof.engine not in self._proved:
            return
        if proof.accepted:
            self._proved[proof.engine] = proof.version
        elif proof.quarantined:
            self._proved[proof.engine] = NO_VERSION
        self._ring()

    async def generate(self, request: Request) -> AsyncIterator[Delta]:
        """See `Engine.generate`."""
        if request.id in self._open or request.id in self._unplaced:
            yield failed_delta(request.id, f"a request with id {request.id!r} is already running")
            return
        if not self._serving(request.version) and not await self._placeable(request):
            yield token_delta(request.id, [], [], NO_VERSION, "aborted")
            return
        engine = self._choose(request)
        life = self._lives[engine.name]
        self._open[request.id] = engine
        self._running[engine.name] += 1
        self._members[request.group] += 1
        try:
            # Closing this iterator early must also close the engine's iterator, because that aborts the request there.
            async with closing_deltas(engine.generate(request)) as deltas:
                async for delta in deltas:
                    if delta.finish == "failed" and life != self._lives[engine.name]:
                        delta = msgspec.structs.replace(delta, finish="aborted", error="")
                    yield delta
        finally:
            del self._open[request.id]
            self._running[engine.name] -= 1
            self._members[request.group] -= 1
            if not self._members[request.group]:
                del self._members[request.group]
                self._home.pop(request.group, None)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests on whichever engine they run, and also those that wait for an engine."""
        self._unplaced = set() if ids is None else self._unplaced - set(ids)
        self._ring()
        await asyncio.gather(*(engine.abort(ids) for engine in self.present))

    async def fork(self, request_id: str, at: int, n: int) -> list[Request]:
        """Fork on the engine where the request runs."""
        engine = self._open.get(request_id)
        if engine is None:
            raise UserError(f"fork of request {request_id}: it is not running")
        return await engine.fork(request_id, at, n)

    async def score(self, token_ids: Int32Array) -> Float32Array:
        """Score on the least loaded engine."""
        return await self._least_loaded().score(token_ids)

    async def close(self) -> None:
        """Close all engines. Requests that wait for an engine end as aborted."""
        self._unplaced = set()
        self._ring()
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _placeable(self, request: Request) -> bool:
        """Wait until an engine serves. Return False if the request is aborted before that."""
        self._unplaced.add(request.id)
        try:
            async with asyncio.timeout(self._patience):
                while request.id in self._unplaced and not self._serving(request.version):
                    await self._changed.wait()
            return request.id in self._unplaced
        except TimeoutError as error:
            raise HeadraceError(self._nobody()) from error
        finally:
            self._unplaced.discard(request.id)

    def _ring(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _choose(self, request: Request) -> Engine:
        serving = self._serving(request.version)
        parent = self._open.get(request.parent)
        if parent in serving:
            return parent
        home = self._home.get(request.group) if request.group else None
        for engine in serving:
            if engine.name == home:
                return engine
        best = self._least_loaded(request.version)
        if request.group:
            self._home[request.group] = best.name
        return best

    def _least_loaded(self, version: int = NO_VERSION) -> Engine:
        serving = self._serving(version)
        if not serving:
            raise HeadraceError(self._nobody())
        return min(serving, key=lambda engine: self._running[engine.name])

    def _serving(self, version: int = NO_VERSION) -> list[Engine]:
        if version != NO_VERSION:
            return [engine for engine in self.engines if self._held.get(engine.name) == version]
        floor = max(0, self.floor)
        return [engine for engine in self.present if self._proved[engine.name] >= floor]

    def _nobody(self) -> str:
        away = "; ".join(f"{name} is away ({reason})" for name, reason in self._away.items())
        return f"no engine serves: none has proved its weights{f' ({away})' if away else ''}"

"""The state of every version of one policy, and the deliveries of versions to engines.

Only this module knows the state of a version.

    published ──▶ sent ──▶ proved         groups begin under it
        │          ├─────▶ stranded       an engine refused it, and the trainer that could send it again is gone
        └──────────┴─────▶ void           its trainer restarted without it: no engine can fetch it any more

A version is orphaned when its trainer has died. Engines may fetch its bytes while these last, but nothing can send the
version again. A restarted trainer publishes the same weights under the next free id (`Window.republish`), never under
the old id.

Each engine has its own loop of deliveries, which always takes the newest version. A slow, absent or quarantined
engine, or one that keeps refusing a version, does not hold up the others. A version is declared, and groups begin under
it, when all present engines have proved it, or when one engine has proved it and the others have had `patience`
seconds. A superseded version is skipped. An engine that is held for an evaluation gets no newer version until the
evaluation has ended, and the other engines do not wait for it. An engine that does not answer, or answers with an error
instead of a proof, is killed; supervision restarts it without weights.

The trainer may free the bytes of a version when the version is acknowledged. That happens when no engine fetches the
version any more, or when a newer version is declared. An engine that still fetches the old version then is refused and
takes the newer one.

    deliver(manifest) ─▶ newest ─▶ a loop per engine: load ─▶ VersionProved event ─▶ pool ─▶ declared
                                     ▲ refused: send all weights again                    └▶ acknowledged
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from headrace.channel.events import Event
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Engine
from headrace.errors import ChannelError, DeliveryError, PeerDied
from headrace.pipeline.parts import Parts
from headrace.types import NO_VERSION

ATTEMPTS = 3
"""How often a version is sent to an engine that refuses it. After that the engine waits for the next version."""


class Versions:
    """The states of all versions, without I/O or waits: callers report what happened and ask for states."""

    def __init__(self) -> None:
        self.asked = False
        """Whether the trainer was asked to publish a first version."""
        self.announced = NO_VERSION
        """The newest version that a trainer has published."""
        self.newest: Manifest | None = None
        """The newest version that was sent. Deliveries bring this version to the engines."""
        self.proved = NO_VERSION
        """The newest version that was declared: engines hold it, and groups begin under it."""
        self._published: deque[Manifest] = deque()
        self._orphaned = NO_VERSION
        self._void = NO_VERSION
        self._stranded = NO_VERSION
        self._fetching: dict[str, int] = {}
        """The version that each engine is fetching, by engine name."""
        self._held: set[int] = set()
        """The versions whose bytes the trainer keeps until they are acknowledged."""

    # ---- published

    def published(self, manifest: Manifest) -> None:
        """Record that the trainer has published a version."""
        self.announced = max(self.announced, manifest.version)
        self._published.append(manifest)

    @property
    def waiting(self) -> bool:
        """Whether a published version has not been sent yet."""
        return bool(self._published)

    # ---- sent

    def next(self) -> Manifest:
        """Mark the oldest published version as sent, so that every engine with an older version fetches it."""
        self.newest = self._published.popleft()
        self._held.add(self.newest.version)
        return self.newest

    def sent_again(self, manifest: Manifest) -> None:
        """Record that the trainer has made all bytes of a version available once more."""
        self._held.add(manifest.version)

    @contextmanager
    def fetched_by(self, engine: str, version: int) -> Iterator[None]:
        """Keep the bytes of this version while the engine fetches it."""
        self._fetching[engine] = version
        try:
            yield
        finally:
            del self._fetching[engine]

    def fetching(self, engine: str) -> int:
        """Return the version that this engine is fetching; `NO_VERSION` if it fetches none."""
        return self._fetching.get(engine, NO_VERSION)

    def superseded(self, version: int) -> bool:
        """Return whether a newer version was sent."""
        return self.newest is not None and self.newest.version > version

    # ---- proved

    def declare(self, version: int) -> None:
        """Record that enough engines have proved this version."""
        self.proved = version

    def release(self, declared: int, *, still_wanted: bool) -> list[int]:
        """Return the versions whose bytes no engine needs any more, oldest first. The trainer may reuse their memory.

        `still_wanted` says whether a present engine has yet to fetch the newest version.
        """
        if self.newest is None:
            return []
        wanted = {version for version in self._fetching.values() if version >= declared}
        # An undeclared version is also kept for engines that are away: there may be no others.
        if self.newest.version > declared or still_wanted:
            wanted.add(self.newest.version)
        done, self._held = self._held - wanted, self._held & wanted
        return sorted(done)

    # ---- orphaned, stranded, void

    def orphan(self) -> None:
        """Record that the trainer is gone: nothing can send the versions published so far again."""
        self._orphaned = self.announced

    def orphaned(self, version: int) -> bool:
        """Return whether the trainer that published this version is gone."""
        return version <= self._orphaned

    def mark_stranded(self, version: int) -> None:
        """Record that an engine refused this version and nothing can send it again: engines wait for the next one."""
        self._stranded = version

    def void_before(self, version: int) -> None:
        """Mark all versions older than this one as void: their bytes went with the trainer that published them."""
        self._void = version
        self._published = deque(one for one in self._published if one.version >= version)
        self._held = {one for one in self._held if one >= version}

    def void(self, version: int) -> bool:
        """Return whether no engine can fetch this version any more."""
        return version < self._void

    def fetchable(self) -> int:
        """Return the version that engines should fetch now; `NO_VERSION` if there is none."""
        if self.newest is None or self.newest.version <= self._stranded or self.void(self.newest.version):
            return NO_VERSION
        return self.newest.version


@dataclass(frozen=True)
class VersionProved(Event):
    """An engine has answered a delivery. The proof says whether the engine holds the version now, or refused it."""

    proof: Proof


class Deliveries:
    """The deliveries to the engines of a pool. `run` must be running while versions are published."""

    def __init__(self, parts: Parts, versions: Versions, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = parts.pool
        self._trainer = parts.trainer
        self._events = parts.events
        self._waits = parts.waits
        self._recorder = parts.recorder
        self._processes = parts.processes
        self._patience = parts.config.delivery.patience
        self._together = parts.window.depth == 0
        """Whether a version is declared only when all present engines have proved it, without a time limit."""
        rolling = parts.config.delivery.rolling
        self._turn: AbstractAsyncContextManager[None] = asyncio.Semaphore(1) if rolling else nullcontext()
        self._versions = versions
        self._clock = clock
        self._first_proof: dict[int, float] = {}
        """The time at which the first engine proved each version, by version."""
        self._answered: dict[str, Proof] = {}
        """The last proof of each engine that the controller has handled, by engine name."""
        self._loops: dict[str, asyncio.Task[None]] = {}
        """The loop of each engine, by engine name."""
        self._ending: set[str] = set()
        """The engines whose loops end as soon as they have nothing to do."""

    async def run(self) -> None:
        """Run the loops of all engines until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for engine in self._pool.engines:
                self.begin(engine)

    def begin(self, engine: Engine) -> None:
        """Deliver to one more engine from now on. `run` must be running."""
        task = self._tasks.create_task(self._engine_loop(engine), name=f"deliver to {engine.name}")
        self._loops[engine.name] = task

    async def end(self, name: str) -> None:
        """Deliver no more to this engine, which was retired and has ended. Free the bytes that were kept for it."""
        self._ending.add(name)
        self._waits.ring()
        await asyncio.wait([self._loops.pop(name)])
        self._ending.discard(name)
        await self._acknowledge()

    async def deliver(self, manifest: Manifest) -> bool:
        """Wait until enough engines have proved a sent version, then declare it. Return False if it became void."""
        self._waits.ring()
        await self._waits.until(
            "deliver",
            lambda: self._explain(manifest.version),
            lambda: self._declarable(manifest.version) or self._versions.void(manifest.version),
        )
        if self._versions.void(manifest.version):
            return False
        self._versions.declare(manifest.version)
        self._pool.floor = manifest.version
        self._first_proof.pop(manifest.version, None)
        await self._acknowledge()
        return True

    def proved(self, proof: Proof) -> None:
        """Record an engine's answer to a delivery. Only `Controller.serve` calls this method."""
        self._pool.loaded(proof)
        if proof.accepted:
            self._first_proof.setdefault(proof.version, self._clock())
        self._answered[proof.engine] = proof
        self._waits.moved()

    async def _engine_loop(self, engine: Engine) -> None:
        while engine.name not in self._ending:
            await self._waits.until(
                engine.name, lambda: "a newer version", lambda: self._wants(engine.name) or engine.name in self._ending
            )
            async with self._turn:
                if not self._wants(engine.name):
                    continue  # It was held or lost while it waited for its turn.
                manifest = self._versions.newest
                assert manifest is not None
                with self._versions.fetched_by(engine.name, manifest.version):
                    await self._bring(engine, manifest)
            await self._acknowledge()
            self._waits.moved()

    def hold(self, version: int | None, count: int) -> int:
        """Hold up to `count` engines, those with the fewest requests, at this version or else at the newest one.

        Return the version; `NO_VERSION` if no engine holds it. `EnginePool.free` ends the hold.
        """
        proved = {engine.name: self._pool.proved(engine.name) for engine in self._pool.present}
        steady = {name: at for name, at in proved.items() if at >= 0 and self._versions.fetching(name) <= at}
        if version is None:
            version = max(steady.values(), default=NO_VERSION)
        running = self._pool.running
        names = sorted((name for name, at in steady.items() if at == version), key=lambda name: running[name])
        self._pool.hold(names[:count], version)
        return version if names else NO_VERSION

    def _wants(self, name: str) -> bool:
        return self._behind(name) and not self._pool.held(name)

    def _behind(self, name: str) -> bool:
        behind = max(self._pool.proved(name), self._pool.refused(name)) < self._versions.fetchable()
        return behind and not self._pool.away(name)

    async def _bring(self, engine: Engine, manifest: Manifest) -> None:
        versions = self._versions
        for attempt in range(1, ATTEMPTS + 1):
            try:
                proof = await self._load(engine, manifest)
            except ChannelError as error:
                self._lose(engine, error)
                return
            if proof.accepted or versions.superseded(manifest.version) or versions.void(manifest.version):
                return
            if attempt < ATTEMPTS:
                try:
                    manifest = await self._resend(manifest)
                except PeerDied:
                    versions.mark_stranded(manifest.version)
                    return
                except ChannelError as error:
                    self._give_up(engine, manifest.version, f"{proof.reason}; {error}")
                    return
                versions.sent_again(manifest)
        self._give_up(engine, manifest.version, proof.reason)

    async def _load(self, engine: Engine, manifest: Manifest) -> Proof:
        """Load the version on the engine. Return the engine's answer after the controller has handled it."""
        proof = await engine.load(manifest)
        self._events.put(VersionProved(proof))
        await self._waits.until(
            engine.name, lambda: "its proof to be recorded", lambda: self._answered.get(engine.name) is proof
        )
        if proof.quarantined:
            # The engine may have received requests before its quarantine was known here. Other engines resume them:
            # the next version may need their answers, and this engine may have to wait for the next version.
            await engine.abort()
        return proof

    async def _resend(self, manifest: Manifest) -> Manifest:
        if self._versions.orphaned(manifest.version):
            # A trainer that restarted meanwhile never had this version, so its answer would be wrong.
            raise PeerDied(self._trainer.name, "it went after it had published this version")
        return await self._trainer.resend(manifest)

    def _lose(self, engine: Engine, error: ChannelError) -> None:
        # Supervision will report how the process ended. Until then the engine gets no request and no version.
        if self._pool.away(engine.name):
            return
        self._pool.lose(engine.name, str(error))
        if not isinstance(error, PeerDied):
            self._recorder.note(f"{error}: {engine.name} is ended")
            self._processes.kill(engine.name)

    def _give_up(self, engine: Engine, version: int, reason: str) -> None:
        """Leave this engine to wait for the next version. Raise `DeliveryError` if no engine accepts this one."""
        self._pool.refuse(engine.name, version)
        if all(self._pool.refused(other.name) == version for other in self._pool.present):
            raise DeliveryError(f"version {version} was refused {ATTEMPTS} times ({engine.name}: {reason})")
        self._recorder.note(f"{engine.name} refused version {version} and waits for the next: {reason}")

    def _declarable(self, version: int) -> bool:
        if not any(self._pool.proved(engine.name) >= version for engine in self._pool.present):
            return False
        late = self._clock() - self._first_proof.get(version, self._clock()) >= self._patience
        return not self._still_wanted() or (late and not self._together)

    def _still_wanted(self) -> bool:
        return any(self._wants(engine.name) for engine in self._pool.present)

    def _explain(self, version: int) -> str:
        behind = [e.name for e in self._pool.present if self._pool.proved(e.name) < version]
        held = [name for name in behind if self._pool.held(name)]
        away = [e.name for e in self._pool.engines if self._pool.away(e.name)]
        parts = [f"{', '.join(behind)} to prove version {version}"] if behind else []
        parts += [f"{', '.join(held)} to end an evaluation"] * bool(held)
        return "; ".join(parts + [f"{', '.join(away)} to come back"] * bool(away)) or f"version {version}"

    async def _acknowledge(self) -> None:
        """Tell the trainer which versions no engine fetches any more, so that it can free their bytes."""
        still_wanted = any(self._behind(engine.name) for engine in self._pool.present)
        for version in self._versions.release(self._pool.floor, still_wanted=still_wanted):
            await self._trainer.acknowledge(version)

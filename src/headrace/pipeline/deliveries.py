"""Versions on their way to engines: each engine has a loop of its own and always takes the newest version.

An engine that is slow, away, in quarantine or refuses a version again and again holds nobody up: a version is declared,
and groups begin under it, once all engines that are here have proved it or the first has and the others had time. A
version that is superseded is skipped. An engine that does not answer, or with an error instead of a proof, is ended:
whoever watches over it starts it again, and it begins anew. A version's bytes are acknowledged when no engine
fetches it any more, or a newer one is declared: an engine that is then still at it is refused, and takes the newer one.

    offer(manifest) ─▶ newest ─▶ a loop an engine: load, prove ─▶ pool ─▶ declared
                                   ▲ refused: all weights again        └▶ acknowledged
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.delivery.base import Manifest
from headrace.engines.base import Engine
from headrace.engines.pool import EnginePool
from headrace.errors import ChannelError, DeliveryError, PeerDied
from headrace.pipeline.recording import Recorder
from headrace.pipeline.waits import Waits
from headrace.training.base import TrainerHandle
from headrace.types import NO_VERSION

ATTEMPTS = 3
"""How often a version is brought to an engine that refuses it, before it is left to wait for the next."""


class Deliveries:
    """Brings versions to the engines of a pool. `run` must run while versions are offered."""

    def __init__(
        self,
        pool: EnginePool,
        trainer: TrainerHandle,
        recorder: Recorder,
        waits: Waits,
        *,
        rolling: bool = False,
        patience: float = 0.0,
        together: bool = False,
        end: Callable[[str], None] = lambda engine: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`together`: a version is declared only when all engines that are here have proved it.

        `end` is told the engines whose processes are to be ended: nobody knows what they do, or with which weights.
        """
        self._pool = pool
        self._trainer = trainer
        self._recorder = recorder
        self._waits = waits
        self._patience = patience
        self._together = together
        self._end = end
        self._clock = clock
        self._turn = asyncio.Semaphore(1 if rolling else len(pool.engines))
        self._newest: Manifest | None = None
        self._fetched: dict[str, int] = {}
        """Engine -> the version that it is fetching."""
        self._unacknowledged: set[int] = set()
        self._first_proof: dict[int, float] = {}
        self._void = NO_VERSION
        """Older versions cannot be fetched any more."""
        self._orphaned = NO_VERSION
        """This version and older ones were published by a trainer that is gone: they can be fetched while their bytes
        last, and be sent again by nobody."""
        self._unsent = NO_VERSION
        """A version that was refused, and could not be sent again because the trainer is gone."""

    async def run(self) -> None:
        """The loops of all engines, until cancelled."""
        async with asyncio.TaskGroup() as loops:
            for engine in self._pool.engines:
                loops.create_task(self._engine_loop(engine), name=f"deliver to {engine.name}")

    async def deliver(self, manifest: Manifest) -> bool:
        """Offer a version and wait until it is declared; False if it became void before."""
        self._newest = manifest
        self._unacknowledged.add(manifest.version)
        self._waits.ring()
        await self._waits.until(
            "deliver",
            lambda: self._explain(manifest.version),
            lambda: self._declarable() or manifest.version < self._void,
        )
        if manifest.version < self._void:
            return False
        self._pool.floor = manifest.version
        self._first_proof.pop(manifest.version, None)
        await self._acknowledge()
        return True

    def orphan(self, version: int) -> None:
        """The trainer is gone, and this was the last version that it published."""
        self._orphaned = version

    def void(self, version: int) -> None:
        """What is older than this version went with the trainer that published it."""
        self._void = version
        self._unacknowledged = {one for one in self._unacknowledged if one >= version}
        self._waits.ring()

    async def _engine_loop(self, engine: Engine) -> None:
        while True:
            await self._waits.until(engine.name, lambda: "a newer version", lambda: self._wants(engine.name))
            async with self._turn:
                await self._bring_newest(engine)
            await self._acknowledge()
            self._waits.moved()

    def _wants(self, name: str) -> bool:
        newest = NO_VERSION if self._newest is None else self._newest.version
        there = newest > self._unsent and newest >= self._void
        behind = max(self._pool.proved(name), self._pool.refused(name)) < newest
        return there and behind and not self._pool.away(name)

    async def _bring_newest(self, engine: Engine) -> None:
        manifest = self._newest
        assert manifest is not None
        self._fetched[engine.name] = manifest.version
        try:
            await self._bring(engine, manifest)
        finally:
            del self._fetched[engine.name]

    async def _bring(self, engine: Engine, manifest: Manifest) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                proof = await engine.load(manifest)
            except ChannelError as error:
                self._lose(engine, error)
                return
            self._recorder.delivered(proof)
            self._pool.loaded(proof)
            if proof.accepted:
                self._first_proof.setdefault(proof.version, self._clock())
                return
            if self._newest is not None and self._newest.version > manifest.version:
                return
            if manifest.version < self._void:
                return
            if attempt < ATTEMPTS:
                try:
                    manifest = await self._resend(manifest)
                except PeerDied:
                    self._unsent = manifest.version  # A trainer that comes back publishes under another id.
                    return
                except ChannelError as error:
                    self._give_up(engine, manifest.version, f"{proof.reason}; {error}")
                    return
                self._unacknowledged.add(manifest.version)
        self._give_up(engine, manifest.version, proof.reason)

    async def _resend(self, manifest: Manifest) -> Manifest:
        if manifest.version <= self._orphaned:
            # The one that has come back meanwhile never had it, whatever it would answer.
            raise PeerDied(self._trainer.name, "it went after it had published this version")
        return await self._trainer.resend(manifest)

    def _lose(self, engine: Engine, error: ChannelError) -> None:
        # Whoever watches over the process knows how it ended, and says so; until then it is given nothing.
        if self._pool.away(engine.name):
            return
        self._pool.lose(engine.name, str(error))
        if not isinstance(error, PeerDied):
            self._recorder.note(f"{error}: {engine.name} is ended")
            self._end(engine.name)

    def _give_up(self, engine: Engine, version: int, reason: str) -> None:
        """This engine waits for the next version; where none takes this one, there will be none."""
        self._pool.refuse(engine.name, version)
        if all(self._pool.refused(other.name) == version for other in self._pool.present):
            raise DeliveryError(f"version {version} was refused {ATTEMPTS} times ({engine.name}: {reason})")
        self._recorder.note(f"{engine.name} refused version {version} and waits for the next: {reason}")

    def _declarable(self) -> bool:
        assert self._newest is not None
        version = self._newest.version
        proved = [self._pool.proved(engine.name) >= version for engine in self._pool.present]
        if not any(proved):
            return False
        late = self._clock() - self._first_proof.get(version, self._clock()) >= self._patience
        waited_for = any(self._wants(engine.name) for engine in self._pool.present)
        return not waited_for or (late and not self._together)

    def _explain(self, version: int) -> str:
        behind = [e.name for e in self._pool.present if self._pool.proved(e.name) < version]
        away = [e.name for e in self._pool.engines if self._pool.away(e.name)]
        parts = [f"{', '.join(behind)} to prove version {version}"] if behind else []
        return "; ".join(parts + [f"{', '.join(away)} to come back"] * bool(away)) or f"version {version}"

    async def _acknowledge(self) -> None:
        """Tell the trainer which bytes nobody fetches any more."""
        newest = self._newest
        if newest is None:
            return
        declared = self._pool.floor
        wanted = {version for version in self._fetched.values() if version >= declared}
        # Until it is declared, also for engines that are away: they may be all there are.
        if newest.version > declared or any(self._wants(engine.name) for engine in self._pool.present):
            wanted.add(newest.version)
        done, self._unacknowledged = self._unacknowledged - wanted, self._unacknowledged & wanted
        for version in sorted(done):
            await self._trainer.acknowledge(version)

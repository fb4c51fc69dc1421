"""Deliveries of versions to engines. Each engine has its own loop, which always takes the newest version.

A slow, absent or quarantined engine, or one that keeps refusing a version, does not hold up the others. A version is
declared, and groups begin under it, when all present engines have proved it, or when one engine has proved it and the
others have had `patience` seconds. A superseded version is skipped. An engine that does not answer, or answers with an
error instead of a proof, is killed; supervision restarts it without weights.

The trainer may free the bytes of a version when the version is acknowledged. That happens when no engine fetches the
version any more, or when a newer version is declared. An engine that still fetches the old version then is refused and
takes the newer one.

    deliver(manifest) ─▶ newest ─▶ a loop per engine: load ─▶ VersionProved event ─▶ pool ─▶ declared
                                     ▲ refused: send all weights again                    └▶ acknowledged
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.channel.events import Event
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Engine
from headrace.errors import ChannelError, DeliveryError, PeerDied
from headrace.pipeline.parts import Parts
from headrace.pipeline.versions import Versions

ATTEMPTS = 3
"""How often a version is sent to an engine that refuses it. After that the engine waits for the next version."""


@dataclass(frozen=True)
class VersionProved(Event):
    """An engine has answered a delivery: it has proved the version or refused it."""

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
        self._turn = asyncio.Semaphore(1 if parts.config.delivery.rolling else len(parts.pool.engines))
        self._versions = versions
        self._clock = clock
        self._first_proof: dict[int, float] = {}
        """The time at which the first engine proved each version, by version."""
        self._answered: dict[str, Proof] = {}
        """The last proof of each engine that the controller has handled, by engine name."""

    async def run(self) -> None:
        """Run the loops of all engines until cancelled."""
        async with asyncio.TaskGroup() as loops:
            for engine in self._pool.engines:
                loops.create_task(self._engine_loop(engine), name=f"deliver to {engine.name}")

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
        while True:
            await self._waits.until(engine.name, lambda: "a newer version", lambda: self._wants(engine.name))
            async with self._turn:
                manifest = self._versions.newest
                assert manifest is not None
                with self._versions.fetched_by(engine.name, manifest.version):
                    await self._bring(engine, manifest)
            await self._acknowledge()
            self._waits.moved()

    def _wants(self, name: str) -> bool:
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
        away = [e.name for e in self._pool.engines if self._pool.away(e.name)]
        parts = [f"{', '.join(behind)} to prove version {version}"] if behind else []
        return "; ".join(parts + [f"{', '.join(away)} to come back"] * bool(away)) or f"version {version}"

    async def _acknowledge(self) -> None:
        """Tell the trainer which versions no engine fetches any more, so that it can free their bytes."""
        for version in self._versions.release(self._pool.floor, still_wanted=self._still_wanted()):
            await self._trainer.acknowledge(version)

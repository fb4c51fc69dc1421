"""Versions on their way to a fleet, by the order of events: who waits for whom, who is skipped, what is released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from controller_parts import FakeRun, FakeTrainer

from headrace.channel.events import Events
from headrace.cluster.base import Processes
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.publisher import Publisher
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports.shm import ShmSender
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.fake import FakeEngine
from headrace.engines.fake_policy import FakePolicy
from headrace.engines.pool import EnginePool
from headrace.errors import ChannelError, DeadlineError, DeliveryError, HeadraceError, PeerDied
from headrace.pipeline.versions import Deliveries, VersionProved, Versions
from headrace.pipeline.waits import Waits

POLICY = FakePolicy(64)


class Gated(FakeEngine):
    """A fake engine whose loads can be held, and fail by script."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, policy=POLICY, slots=16)
        self.asked: list[int] = []
        """Versions that it was asked to load."""
        self.open = asyncio.Event()
        self.open.set()
        self.raises: list[ChannelError] = []
        self.requests: list[str] = []

    async def load(self, manifest: Manifest) -> Proof:
        self.asked.append(manifest.version)
        await self.open.wait()
        if self.raises:
            raise self.raises.pop()
        return await super().load(manifest)

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        self.requests.append(request.id)
        return super().generate(request)

    def script(self, version: int, outcome: str | None) -> None:
        if outcome is None:
            self._loads.pop(version, None)
        else:
            self._loads[version] = outcome  # type: ignore[assignment]


class Book:
    """What deliveries write down."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, line: str) -> None:
        self.notes.append(line)


class Ended(Processes):
    """Which processes deliveries have ended."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def kill(self, name: str) -> None:
        self.names.append(name)


def parts_of(
    pool: EnginePool, trainer: Any, events: Events, waits: Waits, book: Book, processes: Any,
    *, patience: float = 10.0, rolling: bool = False, together: bool = False,
) -> Any:  # fmt: skip
    """What deliveries need of the parts of a run; a synchronous run delivers to all engines together."""
    return SimpleNamespace(
        config=SimpleNamespace(delivery=SimpleNamespace(patience=patience, rolling=rolling)),
        pool=pool, trainer=trainer, events=events, waits=waits, recorder=book, processes=processes,
        window=SimpleNamespace(depth=0 if together else 1),
    )  # fmt: skip


class Rig:
    """Real deliveries over fake engines, with a clock that the test moves; it owns the events."""

    def __init__(self, engines: int, **options: Any) -> None:
        self.engines = [Gated(f"engine-{n}") for n in range(engines)]
        self.pool = EnginePool(self.engines, patience=0.3)
        self.events = Events()
        self.trainer = FakeTrainer(POLICY, 0.0, self.events)
        self.waits = Waits()
        self.book = Book()
        self.ended = Ended()
        self.versions = Versions()
        self.proofs: list[Proof] = []
        self.now = 0.0
        parts = parts_of(self.pool, self.trainer, self.events, self.waits, self.book, self.ended, **options)
        self.deliveries = Deliveries(parts, self.versions, lambda: self.now)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.deliveries.run())
            await serve(self.events, self.deliveries, self.proofs)

    def offer(self, version: int) -> asyncio.Task[bool]:
        manifest = POLICY.manifest(version, parent=version - 1)
        self.versions.published(manifest)
        return asyncio.create_task(self.deliveries.deliver(self.versions.next()))

    async def delivered(self, version: int) -> None:
        await asyncio.wait_for(self.offer(version), 60)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.waits.ring()
        await settle()

    async def request(self, name: str) -> str:
        """The engine that serves a new request."""
        async for _ in self.pool.generate(ask(name)):
            pass
        return next(engine.name for engine in self.engines if name in engine.requests)

    async def come_back(self, name: str) -> None:
        self.pool.take_back(name)
        self.waits.moved()
        await settle()


async def serve(events: Events, deliveries: Deliveries, proofs: list[Proof]) -> None:
    """What the controller does with the events of deliveries."""
    while True:
        for event in await events.take():
            if isinstance(event, VersionProved):
                proofs.append(event.proof)
                deliveries.proved(event.proof)


async def settle() -> None:
    """Let everything happen that can happen now."""
    for _ in range(30):
        await asyncio.sleep(0)


@asynccontextmanager
async def rig(engines: int, **options: Any) -> AsyncIterator[Rig]:
    made = Rig(engines, **options)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for engine in made.engines:
            await engine.close()


@pytest.mark.parametrize("rolling", [False, True])
async def test_all_at_once_or_one_after_the_other(rolling: bool) -> None:
    async with rig(3, rolling=rolling) as fleet:
        for engine in fleet.engines:
            engine.open.clear()
        offered = fleet.offer(1)
        await settle()
        for done in range(3):
            begun = [engine for engine in fleet.engines if engine.asked]
            assert len(begun) == (done + 1 if rolling else 3)
            assert not offered.done()
            next(engine for engine in begun if not engine.open.is_set()).open.set()
            await settle()
        await asyncio.wait_for(offered, 60)
        assert [engine.asked for engine in fleet.engines] == [[1]] * 3
        assert fleet.trainer.acknowledged == [1]


async def test_a_slow_engine_holds_nobody_up_and_gets_no_new_group_meanwhile() -> None:
    async with rig(2) as fleet:
        await fleet.delivered(1)
        slow = fleet.engines[1]
        slow.open.clear()
        offered = fleet.offer(2)
        await settle()
        assert fleet.pool.proved("engine-0") == 2
        await fleet.pass_time(9.9)
        assert not offered.done() and fleet.pool.floor == 1, "it has time until patience ends"
        assert any("engine-1 to prove version 2" in wait.what for wait in fleet.waits.entries())
        await fleet.pass_time(0.2)
        assert offered.done() and fleet.pool.floor == 2
        assert {await fleet.request(f"during-{n}") for n in range(4)} == {"engine-0"}
        slow.open.set()
        await settle()
        assert fleet.pool.proved("engine-1") == 2
        held = await begin(fleet, "engine-0", "held")
        assert await fleet.request("after") == "engine-1"
        await held.aclose()  # type: ignore[attr-defined]


async def begin(fleet: Rig, name: str, request_id: str) -> AsyncIterator[Delta]:
    """A request that runs on this engine, the least loaded one."""
    sampling = Sampling(max_tokens=10_000)
    deltas = fleet.pool.generate(Request(id=request_id, token_ids=np.arange(4, dtype=np.int32), sampling=sampling))
    await anext(deltas)
    assert request_id in next(engine for engine in fleet.engines if engine.name == name).requests
    return deltas


async def test_together_waits_for_all_that_are_here() -> None:
    async with rig(2, together=True) as fleet:
        fleet.engines[1].open.clear()
        offered = fleet.offer(1)
        await settle()
        await fleet.pass_time(1000)
        assert not offered.done()
        fleet.engines[1].open.set()
        await asyncio.wait_for(offered, 60)


async def test_an_engine_that_is_still_busy_skips_what_came_meanwhile() -> None:
    async with rig(2, patience=1.0) as fleet:
        slow = fleet.engines[1]
        slow.open.clear()
        for version in (1, 2, 3):
            offered = fleet.offer(version)
            await settle()
            await fleet.pass_time(2)
            await asyncio.wait_for(offered, 60)
        assert slow.asked == [1]
        slow.open.set()
        await settle()
        assert slow.asked == [1, 3] and fleet.pool.proved("engine-1") == 3
        assert fleet.engines[0].asked == [1, 2, 3]


async def test_bytes_are_released_when_nobody_fetches_them_any_more() -> None:
    async with rig(2, patience=1.0) as fleet:
        released = fleet.trainer.acknowledged
        slow = fleet.engines[1]
        slow.open.clear()
        first = fleet.offer(1)
        await settle()
        assert released == [], "nobody has proved it"
        await fleet.pass_time(2)
        await asyncio.wait_for(first, 60)
        assert released == [], "engine-1 fetches it"
        second = fleet.offer(2)
        await settle()
        assert released == [], "engine-1 fetches version 1, and will want version 2"
        await fleet.pass_time(2)
        await asyncio.wait_for(second, 60)
        assert released == [1], "with version 2 declared nobody needs version 1: the trainer's two places are not stuck"
        slow.open.set()
        await settle()
        assert released == [1, 2] and slow.asked == [1, 2]


async def test_a_version_that_only_a_lost_engine_could_take_is_kept_for_it() -> None:
    async with rig(1) as fleet:
        await fleet.delivered(1)
        fleet.engines[0].raises.append(PeerDied("engine-0", "killed by signal 9"))
        offered = fleet.offer(2)
        await settle()
        assert fleet.pool.away("engine-0") and not offered.done()
        assert fleet.trainer.acknowledged == [1]
        assert any("engine-0 to come back" in wait.what for wait in fleet.waits.entries())
        await fleet.come_back("engine-0")
        await asyncio.wait_for(offered, 60)
        assert fleet.trainer.acknowledged == [1, 2] and fleet.engines[0].asked == [1, 2, 2]


async def test_an_engine_lost_in_a_load_is_not_waited_for_and_comes_back_at_the_current_version() -> None:
    async with rig(2) as fleet:
        await fleet.delivered(1)
        victim = fleet.engines[1]
        victim.raises.append(PeerDied("engine-1", "killed by signal 9"))
        await fleet.delivered(2)
        await fleet.delivered(3)
        assert fleet.pool.away("engine-1") and victim.asked == [1, 2]
        assert fleet.book.notes == [], "who watches over processes has said it"
        victim.open.clear()
        await fleet.come_back("engine-1")
        assert victim.asked == [1, 2, 3]
        assert {await fleet.request(f"before-{n}") for n in range(3)} == {"engine-0"}, "it has no weights yet"
        victim.open.set()
        await settle()
        held = await begin(fleet, "engine-0", "held")
        assert await fleet.request("after") == "engine-1"
        await held.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "error", [DeadlineError("engine-1 did not answer Load within 120 s"), ChannelError("engine-1: OSError: no room")]
)
async def test_an_engine_without_a_proof_to_answer_with_is_ended_and_begins_anew(error: ChannelError) -> None:
    async with rig(2) as fleet:
        ended = fleet.ended.names
        await fleet.delivered(1)
        victim = fleet.engines[1]
        victim.raises.append(error)
        await fleet.delivered(2)
        assert ended == ["engine-1"]
        assert fleet.book.notes == [f"{error}: engine-1 is ended"]
        assert {await fleet.request(f"{n}") for n in range(3)} == {"engine-0"}
        await fleet.come_back("engine-1")
        assert fleet.pool.proved("engine-1") == 2 and victim.asked == [1, 2, 2]
        await fleet.delivered(3)
        assert fleet.pool.proved("engine-1") == 3 and ended == ["engine-1"]


async def test_a_quarantined_engine_serves_again_once_all_weights_were_proved() -> None:
    async with rig(2) as fleet:
        await fleet.delivered(1)
        sick = fleet.engines[1]
        sick.script(2, "quarantine")
        hold = asyncio.Event()
        resend = fleet.trainer.resend

        async def held(manifest: Manifest) -> Manifest:
            assert fleet.pool.proved("engine-1") == -1
            assert {await fleet.request(f"during-{n}") for n in range(3)} == {"engine-0"}
            await hold.wait()
            sick.script(2, None)
            return await resend(manifest)

        fleet.trainer.resend = held  # type: ignore[method-assign]
        offered = fleet.offer(2)
        await asyncio.sleep(0.05)
        assert not offered.done()
        hold.set()
        await asyncio.wait_for(offered, 60)
        assert fleet.trainer.resent == [2] and fleet.pool.proved("engine-1") == 2
        assert [(proof.engine, proof.quarantined) for proof in fleet.proofs if not proof.accepted] == [
            ("engine-1", True)
        ]


async def test_requests_of_an_engine_that_stays_in_quarantine_end_and_can_be_resumed() -> None:
    """The next version may need these requests, and the engine may have to wait for the next version."""
    async with rig(2) as fleet:
        await fleet.delivered(1)
        well, sick = fleet.engines
        for engine in fleet.engines:
            engine.gate.clear()
        requests = [fleet.pool.generate(ask(name)) for name in ("a", "b")]
        ends = [asyncio.ensure_future(anext(each)) for each in requests]
        await settle()
        assert (well.requests, sick.requests) == (["a"], ["b"])
        sick.script(2, "quarantine")
        await fleet.delivered(2)
        ended = await asyncio.wait_for(ends[1], 10)
        assert ended.finish == "aborted" and not ends[0].done()
        well.gate.set()
        assert await fleet.request("b again") == "engine-0"
        assert (await asyncio.wait_for(ends[0], 10)).finish != "aborted"


def ask(request_id: str) -> Request:
    return Request(id=request_id, token_ids=np.arange(4, dtype=np.int32), sampling=Sampling(max_tokens=2))


@pytest.mark.parametrize("outcome", ["reject", "quarantine"])
async def test_one_engine_that_refuses_a_version_waits_for_the_next(outcome: str) -> None:
    async with rig(2) as fleet:
        await fleet.delivered(1)
        fleet.engines[1].script(2, outcome)
        await fleet.delivered(2)
        await settle()
        assert fleet.engines[1].asked == [1, 2, 2, 2] and fleet.trainer.resent == [2, 2]
        (note,) = fleet.book.notes
        assert note.startswith("engine-1 refused version 2 and waits for the next: ")
        assert {await fleet.request(f"{n}") for n in range(3)} == {"engine-0"}
        assert fleet.trainer.acknowledged == [1, 2]
        await fleet.delivered(3)
        assert fleet.pool.proved("engine-1") == 3


async def test_a_version_that_all_refuse_ends_the_run() -> None:
    made = Rig(2)
    running = asyncio.create_task(made.run())
    for engine in made.engines:
        engine.script(1, "reject")
    made.offer(1)
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(running, 60)
    assert caught.group_contains(DeliveryError, match="version 1 was refused 3 times")
    for engine in made.engines:
        await engine.close()


async def test_what_the_trainer_cannot_send_again_is_no_fault_of_the_engine() -> None:
    async with rig(2) as fleet:
        await fleet.delivered(1)
        fleet.engines[1].script(2, "reject")

        async def gone(manifest: Manifest) -> Manifest:
            raise ChannelError("trainer-0: version 2 cannot be sent any more: a newer one is acknowledged")

        fleet.trainer.resend = gone  # type: ignore[method-assign]
        await fleet.delivered(2)
        assert not fleet.pool.away("engine-1")
        assert "version 2 cannot be sent any more" in fleet.book.notes[0]
        await fleet.delivered(3)
        assert fleet.pool.proved("engine-1") == 3


async def test_what_went_with_its_trainer_is_not_asked_of_the_one_that_comes_back() -> None:
    async with rig(1) as fleet:
        await fleet.delivered(1)
        fleet.engines[0].script(2, "reject")
        offered = fleet.offer(2)
        fleet.versions.orphan()
        await settle()
        assert not fleet.trainer.resent and not offered.done(), "it waits for the same weights under another id"
        fleet.versions.void_before(3)
        fleet.waits.ring()
        assert await asyncio.wait_for(offered, 60) is False
        await fleet.delivered(3)
        assert fleet.pool.proved("engine-0") == 3


async def test_a_request_waits_for_an_engine_that_serves_and_then_says_why_there_is_none() -> None:
    async with rig(2) as fleet:
        waiting = asyncio.create_task(fleet.request("early"))
        await settle()
        assert not waiting.done()
        await fleet.delivered(1)
        assert await asyncio.wait_for(waiting, 60) in ("engine-0", "engine-1")
        for name in ("engine-0", "engine-1"):
            fleet.pool.lose(name, "killed by signal 9")
        with pytest.raises(HeadraceError) as caught:
            await asyncio.wait_for(fleet.request("late"), 60)
        assert str(caught.value) == (
            "no engine serves: none has proved its weights (engine-0 is away (killed by signal 9); engine-1 is away"
            " (killed by signal 9))"
        )


async def test_what_a_lost_engine_was_at_goes_on_by_prefix_on_another(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, "run.versions=8", "rollouts.max_tokens=64", "buffer.depth=1", engines=2)
    pool = run.controller.parts.pool
    prompts: list[int] = []
    generate = run.engines[1].generate

    def spy(request: Request) -> AsyncIterator[Delta]:
        prompts.append(len(request.token_ids))
        return generate(request)

    run.engines[1].generate = spy  # type: ignore[method-assign]

    killed: list[int] = []

    def kill() -> None:
        victim = run.engines[0]
        # Whoever runs has a token.
        under_way = victim.counters().running
        if under_way < 2 or killed:
            return
        killed.append(under_way)
        pool.lose("engine-0", "killed by signal 9")
        victim.die("engine-0 died: killed by signal 9")

    watching = asyncio.create_task(every(0.002, lambda: kill() if len(run.trainer.batches) >= 3 else None))
    await run.run()
    watching.cancel()
    assert killed
    ledger = run.recorder.ledgers.as_dict()["groups"]
    assert (ledger["trained"], ledger["failed"]) == (16, 0), "nothing is lost with it"
    assert min(prompts) < max(prompts), "what it had said is the prompt of what follows"
    policy = run.engines[0].policy
    for batch in run.trainer.batches:
        assert np.isin(batch.versions, range(-1, 9)).all()
        _check_tokens(policy, batch)


def _check_tokens(policy: FakePolicy, batch: Any) -> None:
    """Every trained token has the log-probability of the version that it is tagged with, at its place."""
    ends = np.cumsum(batch.lengths)
    for start, stop in zip(ends - batch.lengths, ends, strict=True):
        for place in range(start, stop):
            if batch.trained[place]:
                token, version = int(batch.token_ids[place]), int(batch.versions[place])
                expected = policy.logprob(token, place - start, version)
                assert batch.logprobs[place] == pytest.approx(expected, abs=1e-5)


# ---- with real weights: the trainer's two places


class Real:
    """An engine of one tensor with a real receiver; its fetches can be held in the middle."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.live = {"w": torch.zeros(64)}
        self.receiver = Receiver(self.live, name)
        self.gate = threading.Event()
        self.gate.set()
        self.refusals: list[str] = []

    async def load(self, manifest: Manifest) -> Proof:
        return await asyncio.to_thread(self._load, manifest)

    def _load(self, manifest: Manifest) -> Proof:
        def held() -> None:
            assert self.gate.wait(20)

        try:
            return self.receiver.swap(self.receiver.stage(manifest, on_arrival=held), score)
        except DeliveryError as error:
            self.refusals.append(str(error))
            return Proof(engine=self.name, version=manifest.version, accepted=False, reason=str(error))


def score(ids: np.ndarray) -> np.ndarray:
    return np.zeros(len(ids) - 1, np.float32)


class RealTrainer:
    def __init__(self) -> None:
        self.publisher = Publisher(
            ShmSender("slow-engine-test"), "float32", 1e-3, np.arange(4, dtype=np.int32), deadline=2.0
        )

    async def publish(self, version: int) -> Manifest:
        weights = {"w": torch.full((64,), float(version))}
        future = await asyncio.to_thread(self.publisher.publish, version, version - 1, version, weights, score)
        return await asyncio.wrap_future(future)

    async def resend(self, manifest: Manifest) -> Manifest:
        return await asyncio.wrap_future(self.publisher.resend(manifest))

    async def acknowledge(self, version: int) -> None:
        self.publisher.acknowledged(version)


async def test_an_engine_that_is_stuck_in_a_fetch_does_not_stop_the_trainer() -> None:
    engines = [Real("engine-0"), Real("engine-1")]
    pool, trainer, book, waits = EnginePool(engines), RealTrainer(), Book(), Waits()  # type: ignore[arg-type]
    versions, events = Versions(), Events()
    deliveries = Deliveries(parts_of(pool, trainer, events, waits, book, Ended(), patience=0.05), versions)
    running = asyncio.gather(deliveries.run(), serve(events, deliveries, []))
    ring = asyncio.create_task(every(0.02, waits.ring))
    try:
        engines[1].gate.clear()
        for version in range(1, 7):
            manifest = await trainer.publish(version)  # raises where no place comes free
            versions.published(manifest)
            await asyncio.wait_for(deliveries.deliver(versions.next()), 60)
            assert engines[0].live["w"].eq(version).all()
        assert engines[1].live["w"].eq(0).all()
        engines[1].gate.set()
        await asyncio.wait_for(waits.until("test", lambda: "engine-1", lambda: pool.proved("engine-1") == 6), 60)
        assert engines[1].live["w"].eq(6).all()
        assert len(engines[1].refusals) == 1, "what it held was used again, and that was noticed"
    finally:
        ring.cancel()
        running.cancel()
        await asyncio.gather(ring, running, return_exceptions=True)
        for engine in engines:
            engine.receiver.close()
        trainer.publisher.close()


async def every(seconds: float, do: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        do()


async def test_an_engine_that_joins_gets_the_newest_version_and_serves_once_it_has_proved_it() -> None:
    async with rig(1) as fleet:
        await fleet.delivered(1)
        await fleet.delivered(2)
        joined = Gated("engine-1")
        joined.open.clear()
        fleet.engines.append(joined)
        fleet.pool.add(joined)
        fleet.deliveries.begin(joined)
        await settle()
        assert joined.asked == [2] and fleet.pool.proved("engine-1") == -1
        busy = await begin(fleet, "engine-0", "busy")
        assert {await fleet.request(f"before-{n}") for n in range(3)} == {"engine-0"}
        joined.open.set()
        await settle()
        assert fleet.pool.proved("engine-1") == 2
        assert await fleet.request("after") == "engine-1"
        await busy.aclose()  # type: ignore[attr-defined]
        await fleet.delivered(3)
        assert [engine.asked for engine in fleet.engines] == [[1, 2, 3], [2, 3]]


async def test_an_engine_that_leaves_ends_its_requests_and_no_delivery_waits_for_it() -> None:
    async with rig(2) as fleet:
        await fleet.delivered(1)
        running = await begin(fleet, "engine-0", "first")
        moved = await begin(fleet, "engine-1", "second")
        leaving = fleet.engines[1]
        leaving.open.clear()
        offered = fleet.offer(2)
        await settle()
        assert leaving.asked == [1, 2] and not offered.done()
        fleet.pool.retire("engine-1", "it leaves the run")
        fleet.waits.ring()
        await settle()
        assert offered.done() and fleet.pool.floor == 2, "nobody waits for it"
        await leaving.abort()
        assert [delta.finish async for delta in moved][-1] == "aborted"
        assert fleet.pool.requests("engine-1") == 0
        fleet.pool.take_back("engine-1")
        assert fleet.pool.away("engine-1"), "it does not come back, whatever supervision had begun"
        leaving.raises.append(PeerDied("engine-1", "it was removed from the run"))
        leaving.open.set()
        await asyncio.wait_for(fleet.deliveries.end("engine-1"), 60)
        fleet.pool.remove("engine-1")
        assert fleet.ended.names == [] and fleet.book.notes == []
        fleet.pool.loaded(Proof(engine="engine-1", version=2, accepted=True))
        assert [engine.name for engine in fleet.pool.present] == ["engine-0"]
        await fleet.delivered(3)
        assert fleet.trainer.acknowledged == [1, 2, 3]
        assert await fleet.request("after") == "engine-0"
        await running.aclose()  # type: ignore[attr-defined]
        # The same name may join again.
        again = fleet.engines[1] = Gated("engine-1")
        fleet.pool.add(again)
        fleet.deliveries.begin(again)
        await settle()
        assert again.asked == [3] and fleet.pool.proved("engine-1") == 3

"""Engines join and leave the real loops: what is asked for, what becomes of it, and what is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from controller_parts import FakeRun

from headrace.engines.fake import FakeEngine
from headrace.engines.fake_policy import FakePolicy
from headrace.errors import UserError
from headrace.observe.metrics import read_metrics
from headrace.pipeline.scaling import ScaleAnswer, ScaleRequest
from waiting import until


class JoiningEngine(FakeEngine):
    """A fake engine that is told when it is lost, like one in another process."""

    def lost(self, reason: str) -> None:
        """It has handed out everything before."""


class FakeCrew:
    """Starts fake engines, or raises what `fails` says about a rank."""

    def __init__(self, urls: tuple[str, ...] = ()) -> None:
        self.ranks = list(range(len(urls))) or [0]
        self.urls = list(urls)
        self.fails: dict[int, str] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.started: list[int] = []
        self.ended: list[int] = []
        self.engines: dict[int, JoiningEngine] = {}

    def place(self, rank: int) -> None:
        if rank > 3:
            raise UserError("there is no free GPU for one more engine")

    def add_url(self, url: str) -> int:
        self.urls.append(url)
        return len(self.urls) - 1

    async def start(self, rank: int) -> Any:
        self.started.append(rank)
        await self.open.wait()
        if rank in self.fails:
            raise UserError(self.fails[rank])
        made = JoiningEngine(name=f"engine-{rank}", policy=FakePolicy(64), slots=16, token_seconds=0.0005)
        self.engines[rank] = made
        return made

    async def end(self, rank: int) -> None:
        self.ended.append(rank)
        if rank in self.engines:
            await self.engines[rank].close()


async def lived(run: FakeRun, live: Callable[[], Any]) -> None:
    """Run to the end, with this meanwhile."""
    running = asyncio.create_task(run.run())
    await until(lambda: run.controller.versions.proved >= 1)
    await live()
    await running
    counts = run.recorder.ledgers.groups.counts()
    assert counts.failed == 0 and counts.in_flight == 0


async def test_engines_join_serve_and_leave_again(tmp_path: Path) -> None:
    crew = FakeCrew()
    run = FakeRun(tmp_path, "run.versions=60", train_seconds=0.03, crew=crew)
    pool, scaling = run.controller.parts.pool, run.controller.scaling

    async def live() -> None:
        assert scaling.ask(ScaleRequest(engines=3)) == ScaleAnswer(before=1, after=3)
        await until(lambda: [engine.name for engine in pool.engines] == ["engine-0", "engine-1", "engine-2"])
        await until(lambda: min(pool.proved("engine-1"), pool.proved("engine-2")) >= run.controller.versions.proved)
        with pytest.raises(UserError, match="there is no free GPU"):
            scaling.ask(ScaleRequest(engines=5))
        crew.open.clear()
        assert scaling.ask(ScaleRequest(engines=4)) == ScaleAnswer(before=3, after=4)
        await until(lambda: crew.started == [1, 2, 3])
        # The fourth has not joined yet.
        assert scaling.ask(ScaleRequest(engines=2)) == ScaleAnswer(before=4, after=2)
        await until(lambda: sorted(crew.ended) == [2, 3])
        crew.open.set()
        await until(lambda: [engine.name for engine in pool.engines] == ["engine-0", "engine-1"])
        assert scaling.ask(ScaleRequest(engines=2)) == ScaleAnswer(before=2, after=2)

    await lived(run, live)
    assert run.journal("SELECT value FROM meta WHERE key = 'engines'") == [{"value": "[0,1]"}]
    changes = [(one["before"], one["after"]) for one in read_metrics(tmp_path / "metrics.jsonl") if "after" in one]
    assert changes == [(1, 3), (3, 4), (4, 2)]
    assert run.journal("SELECT * FROM restarts") == []


async def test_an_engine_that_cannot_join_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    crew = FakeCrew()
    crew.fails[1] = "engine-1 died: out of memory"
    run = FakeRun(tmp_path, "run.versions=40", train_seconds=0.03, crew=crew)

    async def live() -> None:
        run.controller.scaling.ask(ScaleRequest(engines=3))
        await until(lambda: 1 in crew.ended)
        await until(lambda: [engine.name for engine in run.controller.parts.pool.engines] == ["engine-0", "engine-2"])
        del crew.fails[1]
        assert run.controller.scaling.ask(ScaleRequest(engines=3)) == ScaleAnswer(before=2, after=3)
        await until(lambda: len(run.controller.parts.pool.engines) == 3)

    await lived(run, live)
    assert run.journal("SELECT value FROM meta WHERE key = 'engines'") == [{"value": "[0,1,2]"}]


async def test_servers_are_replaced_without_a_moment_in_which_none_serves(tmp_path: Path) -> None:
    crew = FakeCrew(urls=("http://a",))
    run = FakeRun(
        tmp_path, "run.versions=40", "engine.kind=vllm", 'engine.urls=["http://a"]', train_seconds=0.03, crew=crew
    )
    run.controller.parts.remote["engine-0"] = JoiningEngine(name="unused", policy=FakePolicy(64))  # type: ignore[assignment]
    pool, scaling = run.controller.parts.pool, run.controller.scaling

    async def live() -> None:
        for request, line in (
            (ScaleRequest(engines=2), "use --add URL or --remove URL"),
            (ScaleRequest(add="http://a"), "it is one of the run's servers already"),
            (ScaleRequest(remove="http://b"), "it is not one of the run's servers"),
            (ScaleRequest(remove="http://a"), "a run needs at least one engine"),
        ):
            with pytest.raises(UserError, match=line):
                scaling.ask(request)
        crew.open.clear()
        assert scaling.ask(ScaleRequest(add="http://b")) == ScaleAnswer(before=1, after=2)
        assert scaling.ask(ScaleRequest(remove="http://a")) == ScaleAnswer(before=2, after=1)
        await until(lambda: crew.started == [1])
        await asyncio.sleep(0.5)
        assert crew.ended == [], "the old server serves until the new one does"
        crew.open.set()
        await until(lambda: crew.ended == [0])
        await until(lambda: [engine.name for engine in pool.engines] == ["engine-1"])

    await lived(run, live)


@pytest.mark.parametrize(("number", "line"), [(0, "allows 2 to 3"), (1, "allows 2 to 3"), (4, "allows 2 to 3")])
async def test_a_range_bounds_commands_too(tmp_path: Path, number: int, line: str) -> None:
    run = FakeRun(tmp_path, "engine.count={least=2, most=3}", crew=FakeCrew())
    with pytest.raises(UserError, match=line):
        run.controller.scaling.ask(ScaleRequest(engines=number))
    run.recorder.close("finished")

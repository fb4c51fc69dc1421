"""Evaluations beside training: each is of one version, and one that has no result is recorded with its reason."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from controller_parts import FakeRun

from headrace.channel.events import Died, Returned
from headrace.engines.base import Delta, Request
from headrace.engines.fake import FakeEngine
from headrace.errors import PeerDied
from headrace.review.summary import summarize, write_report
from waiting import until

EVALUATED = ("evaluate.prompts=6", "evaluate.every=2", "run.versions=8", "buffer.depth=2")


def listen(run: FakeRun) -> dict[int, Counter[int]]:
    """Return the held-out tokens by the version that their request names, and by the version that sampled them."""
    heard: dict[int, Counter[int]] = {}

    def listening(engine: FakeEngine) -> None:
        plain = engine.generate

        async def generate(request: Request) -> AsyncIterator[Delta]:
            async for delta in plain(request):
                if request.id.startswith("heldout-"):
                    named = int(request.id.removeprefix("heldout-").partition("/")[0])
                    heard.setdefault(named, Counter()).update(delta.versions.tolist())
                yield delta

        engine.generate = generate  # type: ignore[method-assign]

    for engine in run.engines:
        listening(engine)
    return heard


def slow(tmp_path: Path, *settings: str, engines: int = 1, **options: Any) -> FakeRun:
    """A run whose versions come faster than its evaluations end: an engine answers one held-out prompt at a time."""
    settings = ("engine.slots=4", f"engine.count={engines}", *EVALUATED, *settings)
    engine = {"lengths": [8], "token_seconds": 0.001}
    return FakeRun(tmp_path, *settings, heldout=6, engines=engines, engine=engine, train_seconds=0.001, **options)


def recorded(run: FakeRun) -> list[tuple[str, int, dict[str, int]]]:
    rows = run.journal("SELECT moment, version, versions FROM evaluations ORDER BY started, version")
    return [(row["moment"], row["version"], json.loads(row["versions"])) for row in rows]


def skipped(run: FakeRun) -> list[tuple[str, int, str]]:
    """The evaluations without a result, as the summary has them."""
    found = summarize(run.path)["evaluations_skipped"]
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    in_metrics = [line for line in lines if line["kind"] == "evaluation_skipped"]
    assert sorted(one["version"] for one in in_metrics) == sorted(one["version"] for one in found)
    return [(one["moment"], one["version"], one["reason"]) for one in found]


@pytest.mark.parametrize("engines", [1, 2, 5])
async def test_friction_49_every_evaluation_is_of_one_version_and_none_is_skipped_in_silence(
    tmp_path: Path, engines: int
) -> None:
    run = slow(tmp_path, engines=engines)
    heard = listen(run)
    await run.run()
    assert heard and {named: list(tokens) for named, tokens in heard.items()} == {named: [named] for named in heard}
    found = recorded(run)
    assert [list(versions) for _, _, versions in found] == [[str(version)] for _, version, _ in found]
    assert [(moment, version) for moment, version, _ in (found[0], found[-1])] == [("before", 0), ("after", 8)]
    during = [version for moment, version, _ in found if moment == "during"]
    late = [version for moment, version, reason in skipped(run) if "still running" in reason and moment == "during"]
    assert sorted(during + late) == [2, 4, 6], "every evaluation that was due is there, or its skip is"
    assert 2 in during and (engines > 1 or not late), "one engine takes no version that the next evaluation needs"
    lags = [int(batch.lags().max()) for batch in run.trainer.batches]
    assert max(lags) <= run.window.lag_bound
    assert run.controller.versions.proved == 8 and not run.controller.parts.pool.holding


async def test_friction_49_the_evaluations_of_a_synchronous_run_are_of_one_version(tmp_path: Path) -> None:
    run = slow(tmp_path, "buffer.depth=0", engines=2)
    await run.run()
    assert [(moment, version) for moment, version, _ in recorded(run)] == [
        ("before", 0),
        *(("during", version) for version in (2, 4, 6)),
        ("after", 8),
    ]
    assert [list(versions) for *_, versions in recorded(run)] == [["0"], ["2"], ["4"], ["6"], ["8"]]
    assert skipped(run) == []


async def test_friction_49_other_engines_go_on_while_one_is_held(tmp_path: Path) -> None:
    """The evaluation waits for a judge that answers only when two more versions were proved by the other engine."""
    run = slow(tmp_path, engines=2, judge=lambda prompt, completion: float(len(completion) % 2))
    pool, versions = run.controller.parts.pool, run.controller.versions
    seen: list[tuple[int, int]] = []
    episode = run.controller.parts.task.episode

    def patient(prompt: Any) -> Any:
        environment = episode(prompt)
        plain = environment.step

        async def step(completion: str) -> Any:
            if prompt.id.startswith("h") and versions.proved == 2:
                await until(lambda: versions.proved >= 4)
            if prompt.id.startswith("h") and pool.holding == 1:
                seen.append(tuple(sorted(pool.proved(engine.name) for engine in run.engines)))  # type: ignore[arg-type]
            return await plain(completion)

        environment.step = step  # type: ignore[method-assign]
        return environment

    run.controller.parts.task.episode = patient  # type: ignore[method-assign]
    await run.run()
    assert any(low == 2 and high >= 4 for low, high in seen), seen
    assert [list(versions) for *_, versions in recorded(run)] == [[str(version)] for _, version, _ in recorded(run)]


@pytest.mark.parametrize("engines", [1, 2])
async def test_friction_49_an_evaluation_goes_on_when_its_engine_dies(tmp_path: Path, engines: int) -> None:
    """It continues on an engine with the same version, or begins again; either way its tokens are of one version."""
    run = slow(tmp_path, engines=engines)
    pool, heard = run.controller.parts.pool, listen(run)
    died: list[str] = []

    async def die() -> None:
        await until(lambda: heard.get(2))
        [name] = [engine.name for engine in run.engines if pool.held(engine.name)]
        died.append(name)
        run.events.put(Died(PeerDied(name, "killed by the test"), restarts=True))
        await run.engines[int(name[-1])].abort()
        await asyncio.sleep(0.02)
        run.events.put(Returned(name))

    dying = asyncio.create_task(die())
    await run.run()
    await dying
    assert died
    found = recorded(run)
    assert [list(versions) for *_, versions in found] == [[str(version)] for _, version, _ in found]
    due = {version for moment, version, _ in found if moment == "during"} | {v for _, v, _ in skipped(run)}
    assert {2, 4, 6} <= due


async def test_friction_49_an_evaluation_over_its_deadline_is_given_up_and_said(tmp_path: Path) -> None:
    run = slow(tmp_path, "evaluate.deadline=0.05")
    episode = run.controller.parts.task.episode

    def hanging(prompt: Any) -> Any:
        environment = episode(prompt)
        plain = environment.step

        async def step(completion: str) -> Any:
            if prompt.id == "h3" and 2 <= run.controller.versions.proved < 8:
                await asyncio.sleep(3600)
            return await plain(completion)

        environment.step = step  # type: ignore[method-assign]
        return environment

    run.controller.parts.task.episode = hanging  # type: ignore[method-assign]
    await run.run()
    page = write_report(run.path).read_text()
    assert "3 evaluations have no result" in page and "48 of 8" in page
    assert [(moment, version) for moment, version, _ in recorded(run)] == [("before", 0), ("after", 8)]
    assert [version for _, version, _ in skipped(run)] == [2, 4, 6]
    assert {reason for *_, reason in skipped(run)} == {"it took longer than [evaluate] deadline = 0.05 s"}


async def test_friction_49_a_stopped_evaluation_is_recorded(tmp_path: Path) -> None:
    run = slow(tmp_path)
    run.trainer.on_batch = lambda: run.controller.stop() if len(run.trainer.batches) == 4 else None
    await run.run()
    assert ("after", "the run was stopped") in [(moment, reason) for moment, _, reason in skipped(run)]

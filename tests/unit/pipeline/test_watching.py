"""Who is stuck, and who waits for whom: what `headrace stall` reads, and what ends an engine that does nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from controller_parts import FakeRun

from headrace.config import dump_config
from headrace.errors import UserError
from headrace.pipeline.waits import EngineWatch, describe, read_status
from headrace.run_dir import RunDir, write_whole


def test_an_engine_with_requests_and_without_tokens_is_stuck() -> None:
    now = [0.0]
    watch = EngineWatch(lambda: now[0])
    assert watch.stuck({"engine-0": 3, "engine-1": 0}, 10.0) == []
    now[0] = 8.0
    watch.progress("engine-0")
    now[0] = 17.0
    assert watch.stuck({"engine-0": 3, "engine-1": 0}, 10.0) == []
    now[0] = 18.5
    assert watch.stuck({"engine-0": 3, "engine-1": 2}, 10.0) == ["engine-0"], "engine-1 has only now been asked"
    watch.forget("engine-0")
    assert watch.stuck({"engine-0": 3, "engine-1": 2}, 10.0) == []
    now[0] = 28.6
    assert watch.stuck({"engine-0": 3, "engine-1": 0}, 10.0) == ["engine-0"]


def test_friction_25_requests_wait_and_a_request_waits() -> None:
    watch = EngineWatch(lambda: 0.0)
    assert [str(wait) for wait in watch.waits({"engine-0": 191, "engine-1": 1, "engine-2": 0})] == [
        "191 requests wait for a token of engine-0, since 0 s",
        "1 request waits for a token of engine-1, since 0 s",
    ]


def test_idle_time_does_not_count() -> None:
    now = [0.0]
    watch = EngineWatch(lambda: now[0])
    watch.progress("engine-0")
    now[0] = 100.0
    assert watch.stuck({"engine-0": 0}, 10.0) == []
    now[0] = 101.0
    assert watch.stuck({"engine-0": 1}, 10.0) == [], "it has just been given something"


async def test_the_status_of_a_live_run_says_who_waits_for_whom(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run_dir = RunDir(tmp_path)
    run_dir.config.write_text(dump_config(run.config))
    with pytest.raises(UserError, match="no run lives there"):
        read_status(tmp_path)
    serving = asyncio.create_task(run.controller.serve())
    await run.controller.begin()
    run.engines[0].gate.clear()
    training = asyncio.create_task(run.controller.train())
    await asyncio.sleep(0.1)
    run.trainer_dies()
    now = [0.0]
    run.controller.watch = EngineWatch(lambda: now[0])
    run.controller.watch.progress(run.engines[0].name)
    now[0] = 7.0
    write_whole(run_dir.status, msgspec.json.encode(run.controller.status({"trainer-0": "loading"})))
    status = read_status(tmp_path)
    waits = {wait.owner: wait.what for wait in status.waits}
    assert "all 4 slots are taken" in waits["admit"]
    assert "0 of 2 groups are ready" in waits["train"]
    assert waits["deliver"] == "trainer-0 to publish version 1"
    requests = run.controller.parts.pool.running[run.engines[0].name]
    assert requests > 1
    assert waits[f"{requests} requests"] == f"a token of {run.engines[0].name}"
    assert status.waits[0].seconds == 7.0, "the longest wait comes first"
    text = describe(status)
    assert "train waits for a batch" in text and "trainer-0: loading" in text
    stale = json.loads(run_dir.status.read_bytes())
    stale["time"] -= 60
    run_dir.status.write_text(json.dumps(stale))
    assert "has written nothing for 60 s" in describe(read_status(tmp_path))
    training.cancel()
    serving.cancel()
    await asyncio.gather(training, serving, return_exceptions=True)
    await run.engines[0].close()
    run.recorder.abandon("test over")
    run.recorder.close("failed")

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.scoring.base import ScoreError
from headrace.scoring.rewards import ThreadScorer
from headrace.types import Prompt

PROMPT = Prompt(id="p", messages=[{"role": "user", "content": "Q"}], data={"answer": "4"})


async def test_sync_and_async_callables() -> None:
    def exact(completion: str, answer: str) -> float:
        return float(completion == answer)

    async def slowly(completion: str, answer: str) -> dict[str, float]:
        await asyncio.sleep(0.01)
        return {"reward": float(completion == answer), "waited": 1}

    assert (await ThreadScorer(exact).judge(PROMPT, "4")).reward == 1.0
    assert (await ThreadScorer(exact).judge(PROMPT, "5")).reward == 0.0
    found = await ThreadScorer(slowly).judge(PROMPT, "4")
    assert (found.reward, found.metrics) == (1.0, {"waited": 1.0})


async def test_it_runs_off_the_loop() -> None:
    loop_thread = threading.get_ident()
    released = threading.Event()

    def reward(completion: str) -> float:
        assert released.wait(5)
        return float(threading.get_ident() != loop_thread)

    asked = asyncio.ensure_future(ThreadScorer(reward).judge(PROMPT, "x"))
    await asyncio.sleep(0)
    released.set()  # only a loop that is not held gets here
    assert (await asked).reward == 1.0


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_callable_that_raises_or_overruns_fails_one_judgement(kind: str) -> None:
    def reward(completion: str) -> float:
        if completion == "raise":
            raise ValueError("bad luck")
        if completion == "hang":
            time.sleep(1.0)
        return 1.0

    async def async_reward(completion: str) -> float:
        if completion == "hang":
            await asyncio.sleep(1.0)
        return reward(completion)

    judge = ThreadScorer(reward if kind == "sync" else async_reward, timeout=0.2)
    results: list[Any] = await asyncio.gather(
        *(judge.judge(PROMPT, text) for text in ("raise", "hang", "fine")), return_exceptions=True
    )
    assert isinstance(results[0], ScoreError) and "raised ValueError: bad luck" in str(results[0])
    assert isinstance(results[1], ScoreError) and str(results[1]) == "the reward function took more than 0.2 s"
    assert results[2].reward == 1.0


async def test_as_many_at_a_time_as_there_are_threads() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def reward(completion: str) -> float:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return 0.0

    judge = ThreadScorer(reward, threads=3)
    await asyncio.gather(*(judge.judge(PROMPT, "x") for _ in range(12)))
    assert 1 < most <= 3


def test_a_callable_without_completion_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="must take `completion`"):
        ThreadScorer(lambda text: 1.0)


def test_the_version_is_that_of_the_source_file() -> None:
    def reward(completion: str) -> float:
        return 0.0

    digest = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest()
    assert ThreadScorer(reward).version == digest
    assert ThreadScorer(functools.wraps(reward)(lambda completion: 1.0)).version == digest
    assert ThreadScorer(functools.partial(reward)).version == "", "it has no file of its own"

"""Reward workers, with real processes. (One worker gives some thousands of trivial judgements a second.)"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.scoring.base import Ended, ScoreError, Turn
from headrace.scoring.rewards import RewardScorer, WorkerScorer
from headrace.tasks.gym import VERIFIER, GymTask
from headrace.types import Prompt, Rollout, Trace
from waiting import alive, until

REWARDS = '''
import asyncio, os, re, subprocess, sys, time
from pathlib import Path

loops = set()

def exact(completion, answer):
    return float(completion == answer)

def wild(completion, data):
    """Does what the completion says."""
    if completion == "print":
        print("x" * 100_000)
        os.write(1, b"raw bytes on descriptor 1")
        sys.__stdout__.write("more"); sys.__stdout__.flush()
        assert sys.stdin.read() == ""
    elif completion == "raise":
        raise ValueError("bad luck\\nover two lines")
    elif completion == "quit":
        sys.exit(3)
    elif completion == "die":
        os._exit(7)
    elif completion == "hang":
        while True: pass
    elif completion == "regex":
        re.match("(a+)+$", "a" * 60 + "b")
    elif completion == "leave a process":
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(data["file"]).write_text(str(started.pid))
        time.sleep(data["seconds"])
    elif completion == "nan":
        return float("nan")
    elif completion == "none":
        return None
    return {"reward": 1, "pid": os.getpid()}

async def later(completion):
    loops.add(asyncio.get_running_loop())
    await asyncio.sleep(0.01)
    if completion == "hang":
        await asyncio.sleep(60)
    return {"reward": 2.0, "loops": len(loops)}

def slow(completion, file):
    with open(file, "a") as log:
        log.write(f"+{completion}\\n")
    time.sleep(0.15)
    with open(file, "a") as log:
        log.write(f"-{completion}\\n")
    return 0.0

def no_completion(answer):
    return 0.0

def maker(scale):
    if scale < 0:
        from headrace.errors import ConfigError
        raise ConfigError("[task] config: scale must not be negative")
    return lambda completion: scale * len(completion)
'''


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


@asynccontextmanager
async def judging(reference: str, **options: Any) -> AsyncIterator[WorkerScorer]:
    judge = WorkerScorer(reference, **options)
    try:
        await judge.start()
        yield judge
    finally:
        await judge.close()


def prompt(**data: Any) -> Prompt:
    return Prompt(id="p", messages=[{"role": "user", "content": "Q"}], data=data)


async def failure(judge: RewardScorer, completion: str, **data: Any) -> str:
    with pytest.raises(ScoreError) as caught:
        await judge.judge(prompt(**data), completion)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path: Path, text: str) -> None:
    path.write_text(text)


async def test_judgements(rewards: Path) -> None:
    async with judging(f"{rewards}:exact", workers=2) as judge:
        completions = ["4", "5", "4", "", "é" * 100_000]
        found = await asyncio.gather(*(judge.judge(prompt(answer="4", big=2**80), text) for text in completions))
        assert [one.reward for one in found] == [1.0, 0.0, 1.0, 0.0, 0.0]
        assert await failure(judge, "4", solution=1) == (
            "the reward function wants 'answer', which this prompt does not have (it has solution)"
        )


async def test_async_functions_share_one_loop(rewards: Path) -> None:
    async with judging(f"{rewards}:later", timeout=0.5) as judge:
        for _ in range(3):
            found = await judge.judge(prompt(), "x")
            assert (found.reward, found.metrics) == (2.0, {"loops": 1.0})
        assert await failure(judge, "hang") == "the reward function took more than 0.5 s"


async def test_a_worker_outlives_what_a_function_prints_and_raises(rewards: Path, tmp_path: Path) -> None:
    log = tmp_path / "rewards.log"
    async with judging(f"{rewards}:wild", log=log) as judge:
        first = (await judge.judge(prompt(), "print")).metrics["pid"]
        assert await failure(judge, "raise") == "the reward function raised ValueError: bad luck (rewards.py, line 18)"
        assert (await failure(judge, "quit")).startswith("the reward function raised SystemExit: 3")
        assert await failure(judge, "nan") == "the reward function gave nan, not a finite number"
        assert await failure(judge, "none") == "the reward function gave a NoneType, not a number"
        assert (await judge.judge(prompt(), "fine")).metrics["pid"] == first
    printed = log.read_text()
    assert "x" * 100_000 in printed and "raw bytes on descriptor 1" in printed and "more" in printed


async def test_a_worker_that_hangs_or_dies_is_replaced(rewards: Path) -> None:
    async with judging(f"{rewards}:wild", timeout=0.3) as judge:
        pids = [(await judge.judge(prompt(), "fine")).metrics["pid"]]
        for completion, reason in [
            ("hang", "the reward function took more than 0.3 s"),
            ("regex", "the reward function took more than 0.3 s"),
            ("die", "the reward worker died (exit code 7) during a judgement"),
        ]:
            assert await failure(judge, completion) == reason
            pids.append((await judge.judge(prompt(), "fine")).metrics["pid"])
        assert len(set(pids)) == 4
        assert [alive(int(pid)) for pid in pids] == [False, False, False, True]
    assert not alive(int(pids[-1]))


async def test_only_the_judgement_that_hangs_fails(rewards: Path) -> None:
    async with judging(f"{rewards}:wild", workers=2, timeout=0.5) as judge:
        asked = ["fine", "hang", "fine", "die", "fine", "raise", "fine", "fine"]
        found = await asyncio.gather(*(judge.judge(prompt(), text) for text in asked), return_exceptions=True)
        assert [isinstance(one, ScoreError) for one in found] == [text != "fine" for text in asked]


async def test_a_cancelled_judgement_does_not_answer_the_next(rewards: Path, tmp_path: Path) -> None:
    async with judging(f"{rewards}:wild", timeout=60) as judge:
        asked = asyncio.ensure_future(judge.judge(prompt(), "hang"))
        await asyncio.sleep(0.1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await failure(judge, "nan") == "the reward function gave nan, not a finite number"
        assert (await judge.judge(prompt(), "fine")).reward == 1.0


async def test_first_come_first_served_as_many_at_a_time_as_there_are_workers(rewards: Path, tmp_path: Path) -> None:
    log = tmp_path / "order"
    # The timeout is less than the whole takes: it counts from when a worker starts on a judgement.
    async with judging(f"{rewards}:slow", workers=2, timeout=0.6) as judge:
        await asyncio.gather(*(judge.judge(prompt(file=str(log)), f"{i:02}") for i in range(10)))
    events = log.read_text().split()
    started = [int(event[1:]) for event in events if event[0] == "+"]
    # Two that start together may write in either order, no more.
    assert all(abs(place - number) <= 1 for place, number in enumerate(started))
    running = [sum(1 if event[0] == "+" else -1 for event in events[: i + 1]) for i in range(len(events))]
    assert max(running) == 2


async def test_processes_that_a_function_started_end_with_its_worker(rewards: Path, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with judging(f"{rewards}:wild", timeout=1.0) as judge:
        assert "took more than" in await failure(judge, "leave a process", file=str(file), seconds=30)
        overdue = int(file.read_text())
        await until(lambda: not alive(overdue))
        await judge.judge(prompt(file=str(file), seconds=0), "leave a process")
        left = int(file.read_text())
        assert alive(left)
    await until(lambda: not alive(left))


async def test_close_ends_judgements_under_way_and_those_that_wait(rewards: Path) -> None:
    judge = WorkerScorer(f"{rewards}:wild", timeout=60)
    await judge.start()
    asked = [asyncio.ensure_future(judge.judge(prompt(), "hang")) for _ in range(3)]
    await asyncio.sleep(0.1)
    await asyncio.gather(judge.close(), judge.close())
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(one, ScoreError) for one in found)
    assert str(found[1]) == str(found[2]) == "the reward workers are closed"
    assert await failure(judge, "fine") == "the reward workers are closed"
    await judge.close()


@pytest.mark.parametrize("completion", ["hang", "regex", ""])
async def test_workers_die_with_their_parent(rewards: Path, tmp_path: Path, completion: str) -> None:
    """Even by SIGKILL, and even in a function that never gives the interpreter's lock back."""
    program = f"""
import asyncio
from headrace.scoring.rewards import WorkerScorer
from headrace.types import Prompt
async def main():
    judge = WorkerScorer({str(rewards) + ":wild"!r}, timeout=60)
    await judge.start()
    prompt = Prompt(id="p", text="x")
    print(int((await judge.judge(prompt, "fine")).metrics["pid"]), flush=True)
    await judge.judge(prompt, {completion!r}) if {completion!r} else await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    async with asyncio.timeout(30):
        pid = int(await parent.stdout.readline())
    await asyncio.sleep(0.2)
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    async with asyncio.timeout(10):
        await parent.wait()
    await until(lambda: not alive(pid))


@pytest.mark.parametrize(
    ("reference", "line"),
    [
        ("nowhere_at_all:reward", "[task] reward 'nowhere_at_all:reward': there is no module 'nowhere_at_all'"),
        ("{dir}/rewards.py:nothing", "[task] reward '{dir}/rewards.py:nothing': '{dir}/rewards.py:nothing': "),
        ("{dir}/none.py:reward", "[task] reward '{dir}/none.py:reward': there is no file {dir}/none.py"),
        ("{dir}/rewards.py:no_completion", "[task] reward '{dir}/rewards.py:no_completion': {dir}/rewards.py:no_compl"),
        ("{dir}/broken.py:f", "[task] reward '{dir}/broken.py:f': importing {dir}/broken.py raised ZeroDivisionError"),
        ("{dir}/exits.py:f", "[task] reward '{dir}/exits.py:f': the reward worker died (exit code 9) while it started"),
        ("{dir}/sleeps.py:f", "[task] reward '{dir}/sleeps.py:f': a reward worker was not ready after 1 s"),
    ],
)
async def test_a_function_that_cannot_be_used_fails_the_start(rewards: Path, reference: str, line: str) -> None:
    directory = rewards.parent
    (directory / "broken.py").write_text("1 / 0")
    (directory / "exits.py").write_text("import os; os._exit(9)")
    (directory / "sleeps.py").write_text("import time; time.sleep(60)")
    seconds = 1.0 if "sleeps" in reference else 30.0
    judge = WorkerScorer(reference.replace("{dir}", str(directory)), workers=2, start_timeout=seconds)
    with pytest.raises(ConfigError) as caught:
        await judge.start()
    assert str(caught.value).startswith(line.replace("{dir}", str(directory)))
    assert "\n" not in str(caught.value)


async def test_a_maker_is_called_once_with_its_arguments(rewards: Path) -> None:
    async with judging(f"{rewards}:maker", arguments={"scale": 0.5}) as judge:
        assert (await judge.judge(prompt(), "four")).reward == 2.0
    with pytest.raises(ConfigError, match=r"raised TypeError: maker\(\) got an unexpected keyword"):
        await WorkerScorer(f"{rewards}:maker", arguments={"size": 0.5}).start()
    with pytest.raises(ConfigError, match=r"^\[task\] config: scale must not be negative$"):
        await WorkerScorer(f"{rewards}:maker", arguments={"scale": -1}).start()


async def test_files_in_the_working_directory_do_not_hide_modules(
    rewards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not that one')")
    monkeypatch.chdir(tmp_path)
    async with judging("rewards:exact") as judge:
        assert (await judge.judge(prompt(answer="4"), "4")).reward == 1.0


async def test_a_gym_dataset_is_verified_in_a_worker() -> None:
    pattern = "<answer>(.*?)</answer>"
    arguments = {"name": "chain_sum", "config": {"max_terms": 3}, "answer_pattern": pattern}
    judge = WorkerScorer(VERIFIER, arguments=arguments)
    task = GymTask("chain_sum", config={"max_terms": 3}, size=3, heldout=2, answer_pattern=pattern, suffix=" Now.")
    await judge.start()
    try:
        for one in [*task.train, *task.heldout]:
            right = one.data["entry"]["answer"]
            assert (await judge.judge(one, f"It is <answer>{right}</answer>")).reward == 1.0
            assert (await judge.judge(one, "<answer>none</answer>")).reward == 0.0
    finally:
        await judge.close()


async def test_a_worker_that_cannot_be_started_again_fails_judgements(rewards: Path) -> None:
    async with judging(f"{rewards}:wild") as judge:
        edit(rewards, "raise ValueError('edited while it ran')")
        assert "edited while it ran" in await failure(judge, "die"), "it is judged once more, by a fresh worker"
        assert "could not be started again" in await failure(judge, "fine")
        edit(rewards, REWARDS)
        assert (await judge.judge(prompt(), "fine")).reward == 1.0


def test_the_owner_leaves_no_descriptor_behind(rewards: Path) -> None:
    async def once() -> None:
        async with judging(f"{rewards}:wild", workers=2, timeout=0.3) as judge:
            await asyncio.gather(judge.judge(prompt(), "fine"), judge.judge(prompt(), "hang"), return_exceptions=True)

    asyncio.run(once())
    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(once())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_worker_that_is_killed_costs_no_judgement(tmp_path: Path) -> None:
    code = """
        import os, time
        from pathlib import Path

        def reward(completion, data):
            marker = Path(data["file"])
            if not marker.exists():
                marker.write_text(str(os.getpid()))
                time.sleep(60)
            return 0.25
    """
    (tmp_path / "slow.py").write_text(textwrap.dedent(code))
    marker = tmp_path / "pid"
    question = Prompt(id="p", text="x", data={"file": str(marker)})
    async with judging(f"{tmp_path / 'slow.py'}:reward", timeout=30.0) as judge:
        asked = asyncio.create_task(judge.judge(question, "x"))
        async with asyncio.timeout(20):
            for _ in range(1000):
                if marker.exists() and marker.read_text():
                    break
                await asyncio.sleep(0.02)
            os.kill(int(marker.read_text()), signal.SIGKILL)
            assert (await asked).reward == 0.25


async def test_a_reward_function_that_forks_does_not_shift_rewards(tmp_path: Path) -> None:
    code = """
        import os

        def reward(completion):
            if completion == "fork":
                os.fork()
            return {"fork": 7.0}.get(completion, float(len(completion)))
    """
    (tmp_path / "forks.py").write_text(textwrap.dedent(code))
    async with judging(f"{tmp_path / 'forks.py'}:reward", timeout=60) as judge:
        found = [(await judge.judge(prompt(), text)).reward for text in ("fork", "a", "bb", "ccc", "fork", "dddd")]
    assert found == [7.0, 1.0, 2.0, 3.0, 7.0, 4.0]


async def test_a_score_has_the_version_of_the_source_that_gave_it(rewards: Path) -> None:
    trace = Trace.of_context(np.array([7], np.int32))
    rollout = Rollout(id="9/0", index=0, traces=[trace], ending="finished")
    ended = Ended(prompt(), rollout, [Turn(0, 0, 1, lambda: "fine")])
    async with judging(f"{rewards}:wild", timeout=0.5) as judge:
        (first,) = await judge.score(ended)
        (again,) = await judge.score(ended)
        assert len(first.version) == 12 and again.version == first.version
        edit(rewards, REWARDS + "# changed")
        (running,) = await judge.score(ended)
        assert running.version == first.version, "a worker judges by what it has loaded"
        assert "took more than" in await failure(judge, "hang")
        (fresh,) = await judge.score(ended)
        assert fresh.version not in (first.version, "")
    async with judging(f"{rewards}:maker", arguments={"scale": 1.0}) as judge:
        assert (await judge.score(ended))[0].version == fresh.version

"""Workers for foreign code that leaks, leaves processes behind, forks, or answers at too great a length."""

import asyncio
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from headrace.channel import worker_pool
from headrace.channel.worker_side import sweep_marked
from headrace.gateway.agent_main import AgentSetup, Job
from headrace.gateway.agents import AgentError, AgentPool
from headrace.scoring.rewards import WorkerScorer
from headrace.types import Prompt
from waiting import alive, until

CODE = """
import asyncio, os, subprocess, sys
from pathlib import Path

kept = []

def pid(completion):
    return {"reward": 1.0, "pid": os.getpid()}

def leaks(completion):
    kept.append(bytearray(b"x" * (32 << 20)))
    return pid(completion)

def daemon(completion, file):
    code = f"import os, time; os.fork() and os._exit(0); open({file!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)
    while not (Path(file).exists() and Path(file).read_text()):
        pass
    return 1.0

def forks(completion):
    child = os.fork()
    if child == 0:
        return 7.0
    os.waitpid(child, 0)
    return float(len(completion))

async def cancels(completion):
    raise asyncio.CancelledError

def agent(prompt):
    return {"long": {"reward": 1, "x" * (65 << 20): 2}, "odd": {"reward": 1, chr(0xd800): 2}}.get(prompt, 0.5)
"""
PROMPT = Prompt(id="p", text="x")


@pytest.fixture
def code(tmp_path: Path) -> Path:
    file = tmp_path / "foreign.py"
    file.write_text(textwrap.dedent(CODE))
    return file


async def pids(judge: WorkerScorer, count: int) -> list[float]:
    await judge.start()
    try:
        return [(await judge.judge(PROMPT, "x")).metrics["pid"] for _ in range(count)]
    finally:
        await judge.close()


async def test_friction_45_a_reward_worker_is_replaced_after_so_many_judgements(code: Path) -> None:
    judge = WorkerScorer(f"{code}:pid", recycle=2)
    found: list[float] = []
    await judge.start()
    try:
        async with asyncio.timeout(120):
            while len(set(found)) < 3:
                found.append((await judge.judge(PROMPT, "x")).metrics["pid"])
    finally:
        await judge.close()
    first, second, third = dict.fromkeys(found)
    assert found.count(first) >= 2 and found.count(second) >= 2
    assert found == sorted(found, key=[first, second, third].index), "one after the other"
    assert not any(alive(int(pid)) for pid in (first, second, third))


async def test_a_reward_worker_judges_until_its_successor_is_ready(tmp_path: Path) -> None:
    """Nothing waits for the second worker, which takes as long to start as the test wants."""
    go = tmp_path / "go"
    code = tmp_path / "slow_to_load.py"
    code.write_text(
        "import os, time\nfrom pathlib import Path\n"
        f"while Path({str(tmp_path / 'first')!r}).exists() and not Path({str(go)!r}).exists():\n    time.sleep(0.02)\n"
        "def pid(completion):\n    return {'reward': 1.0, 'pid': os.getpid()}\n"
    )
    judge = WorkerScorer(f"{code}:pid", recycle=3)
    await judge.start()
    (tmp_path / "first").touch()
    try:
        found = [(await judge.judge(PROMPT, "x")).metrics["pid"] for _ in range(50)]
        assert len(set(found)) == 1
        go.touch()
        async with asyncio.timeout(120):
            while len(set(found)) < 2:
                found.append((await judge.judge(PROMPT, "x")).metrics["pid"])
    finally:
        await judge.close()


async def test_friction_45_a_reward_worker_that_grows_is_replaced(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "GROWTH_BYTES", 48 << 20)
    monkeypatch.setattr(worker_pool, "LOOK_SECONDS", 0.0)
    found = await pids(WorkerScorer(f"{code}:leaks"), 5)
    assert len(set(found)) == 2 and found[0] == found[1] == found[2]


async def test_friction_45_a_process_in_a_session_of_its_own_ends_with_the_run(code: Path, tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    judge = WorkerScorer(f"{code}:daemon", timeout=60)
    await judge.start()
    await judge.judge(Prompt(id="p", text="x", data={"file": str(file)}), "x")
    left = int(file.read_text())
    assert alive(left)
    await judge.close()
    await until(lambda: not alive(left))


async def test_friction_45_what_a_killed_run_left_in_a_session_of_its_own_ends_with_the_next(
    code: Path, tmp_path: Path
) -> None:
    file = tmp_path / "daemon"
    program = f"""
import asyncio
from headrace.scoring.rewards import WorkerScorer
from headrace.types import Prompt
async def main():
    judge = WorkerScorer({f"{code}:daemon"!r}, timeout=60)
    await judge.start()
    await judge.judge(Prompt(id="p", text="x", data={{"file": {str(file)!r}}}), "x")
    print("left", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    async with asyncio.timeout(60):
        assert await parent.stdout.readline() == b"left\n"
    left = int(file.read_text())
    sweep_marked()
    assert alive(left), "its run lives"
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    sweep_marked()
    await until(lambda: not alive(left))


async def test_friction_37_a_fork_of_a_worker_does_not_answer_for_it(code: Path) -> None:
    judge = WorkerScorer(f"{code}:forks", timeout=60)
    await judge.start()
    try:
        assert [(await judge.judge(PROMPT, text)).reward for text in ("a", "bb", "ccc")] == [1.0, 2.0, 3.0]
    finally:
        await judge.close()


async def test_friction_40_a_function_that_cancels_itself_fails_one_judgement(code: Path) -> None:
    judge = WorkerScorer(f"{code}:cancels", timeout=60)
    await judge.start()
    try:
        with pytest.raises(Exception, match="the reward function raised CancelledError"):
            await judge.judge(PROMPT, "x")
    finally:
        await judge.close()


async def test_friction_40_an_answer_that_is_too_long_fails_that_call_only(code: Path) -> None:
    pool = AgentPool(AgentSetup(function=f"{code}:agent"), workers=1, concurrency=3)
    await pool.start()

    async def run(prompt: str) -> float | None:
        job = Job(base_url="http://x", api_key="k", model="m", session=prompt, prompt=prompt, messages=[])
        return (await pool.run(job)).reward

    try:
        async with asyncio.timeout(60):
            found = await asyncio.gather(*map(run, ("long", "odd", "short")), return_exceptions=True)
            assert await run("short") == 0.5
    finally:
        await pool.close()
    assert found[2] == 0.5
    assert all(isinstance(one, AgentError) for one in found[:2])
    assert "bytes is over the limit of 67,108,864" in str(found[0])
    assert str(found[1]).startswith("the answer cannot be sent: ")

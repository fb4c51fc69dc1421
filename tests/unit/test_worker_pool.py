"""The pool of worker processes, with real processes: several questions open at once, given up, lost with a worker."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.channel.worker_pool import PoolClosed, WorkerDied, WorkerPool, receive
from headrace.channel.worker_side import HEADER, pack, read
from headrace.errors import ConfigError
from waiting import alive, until

SERVANT = """
import os, threading, time
from pathlib import Path
from typing import Any

import msgspec
from headrace.channel.worker_side import Owner, die_with_parent, end_descendants
from headrace.errors import ConfigError

class Setup(msgspec.Struct):
    text: str

class Question(msgspec.Struct):
    seconds: float = 0.0
    die: bool = False
    halted: str = ""

class Answer(msgspec.Struct):
    pid: int
    text: str

def check(setup):
    if setup.text == "refuse":
        raise ConfigError("it is not wanted")
    return setup

die_with_parent()
owner = Owner()
setup = owner.greet(Setup, check)
files = {}

def run(id, question):
    time.sleep(question.seconds)
    if question.die:
        os._exit(5)
    owner.answer(id, Answer(pid=os.getpid(), text=f"{setup.text} {question.seconds:g}"))

if setup is not None:
    for id, question in owner.questions(Question):
        if question is None:
            Path(files[id]).write_text("halted")
        else:
            files[id] = question.halted
            threading.Thread(target=run, args=(id, question), daemon=True).start()
    end_descendants()
"""


class Setup(msgspec.Struct):
    text: str = "waited"


class Answer(msgspec.Struct):
    pid: int
    text: str


class Other(msgspec.Struct):
    judgement: float


class Question(msgspec.Struct):
    seconds: float = 0.0
    die: bool = False
    halted: str = ""


@pytest.fixture(autouse=True)
def servant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "servant_for_tests.py").write_text(SERVANT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@asynccontextmanager
async def pool(setup: Setup | None = None, **options: Any) -> AsyncIterator[WorkerPool]:
    found = WorkerPool("servant_for_tests", setup or Setup(), **{"workers": 1, "grace": 2.0, **options})
    try:
        await found.start()
        yield found
    finally:
        await found.close()


async def asked(pool: WorkerPool, timeout: float = 20.0, **question: Any) -> Answer:
    async with pool.places:
        return await pool.ask(msgspec.json.encode(Question(**question)), Answer, timeout)


async def test_a_frame_is_read_whole_or_not_at_all() -> None:
    frames = pack(7, b'{"a":1}') + pack(8, b"")
    for end in range(len(frames) + 1):
        stream, reader = io.BytesIO(frames[:end]), asyncio.StreamReader()
        reader.feed_data(frames[:end])
        reader.feed_eof()
        wanted = [(7, b'{"a":1}')] * (end >= HEADER.size + 7) + [(8, b"")] * (end == len(frames))
        for frame in [*wanted, None]:
            assert read(stream) == frame
            assert await receive(reader) == frame


async def test_questions_of_one_worker_are_open_at_the_same_time() -> None:
    async with pool(concurrency=3) as workers:
        ends: list[float] = []

        async def one(seconds: float) -> Answer:
            answer = await asked(workers, seconds=seconds)
            ends.append(seconds)
            return answer

        answers = await asyncio.gather(*map(one, (0.6, 0.3, 0.0, 0.01)))
        assert [answer.text for answer in answers] == ["waited 0.6", "waited 0.3", "waited 0", "waited 0.01"]
        assert ends == [0.0, 0.01, 0.3, 0.6], "the fourth had to wait for the first place that was free"
        assert len({answer.pid for answer in answers}) == 1


async def test_work_is_shared_among_the_workers() -> None:
    async with pool(workers=2, concurrency=2) as workers:
        answers = await asyncio.gather(*(asked(workers, seconds=0.3) for _ in range(4)))
        pids = [answer.pid for answer in answers]
        assert len(set(pids)) == 2 and all(pids.count(pid) == 2 for pid in pids)


async def test_a_worker_with_a_question_given_up_answers_the_others_and_ends(tmp_path: Path) -> None:
    halted = tmp_path / "halted"
    async with pool(concurrency=2) as workers:
        other = asyncio.create_task(asked(workers, seconds=3.0))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asked(workers, timeout=0.2, seconds=60.0, halted=str(halted))
        fresh = await asked(workers)
        assert not other.done(), "a fresh worker is started beside the one that has questions left"
        await until(halted.exists)
        answered = await other
        assert answered.text == "waited 3" and answered.pid != fresh.pid
        await until(lambda: not alive(answered.pid))
        assert (await asked(workers)).pid == fresh.pid


async def test_a_worker_that_dies_loses_its_questions_and_is_replaced() -> None:
    async with pool(concurrency=2) as workers:
        found = await asyncio.gather(
            asked(workers, seconds=30.0), asked(workers, seconds=0.2, die=True), return_exceptions=True
        )
        assert [repr(one) for one in found] == ["WorkerDied('died (exit code 5)')"] * 2
        first = (await asked(workers)).pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: not alive(first))
        await asyncio.sleep(0.1)
        assert (await asked(workers)).pid != first, "one that died with no question open costs no question"


async def test_an_answer_of_the_wrong_kind_costs_the_worker() -> None:
    async with pool() as workers:
        first = (await asked(workers)).pid
        with pytest.raises(WorkerDied, match="spoke nonsense"):
            await workers.ask(msgspec.json.encode(Question()), Other, 20.0)
        assert (await asked(workers)).pid != first


async def test_a_worker_that_cannot_start_is_a_mistake_of_the_user() -> None:
    with pytest.raises(ConfigError, match=r"^it is not wanted$"):
        async with pool(Setup(text="refuse"), workers=2):
            pass


async def test_a_closed_pool_answers_nothing() -> None:
    async with pool(workers=2) as workers:
        pid = (await asked(workers)).pid
        waiting = asyncio.create_task(asked(workers, seconds=60.0))
        await asyncio.sleep(0.05)
        await asyncio.gather(workers.close(), workers.close())
        assert not alive(pid)
        with pytest.raises(WorkerDied):
            await waiting
        with pytest.raises(PoolClosed):
            await asked(workers)

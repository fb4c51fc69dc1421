"""Any asyncio engine behind an event loop in a thread: its requests, its answers, and what is said when it is lost."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from link_stub import StubLink

from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.fake import FakeEngine
from headrace.engines.serving import EventLoopServer, Opened
from headrace.errors import DeadlineError, HeadraceError, PeerDied

SECONDS = 60.0


class Dependency:
    """What an engine depends on. The test says when it is lost."""

    def __init__(self) -> None:
        self.lost = threading.Event()
        self.checked = threading.Event()

    async def check(self) -> None:
        self.checked.set()
        if self.lost.is_set():
            raise PeerDied("the server", "pulled out")


class Served:
    """A server in a thread, and what it emitted."""

    def __init__(self, make: Callable[[], Any], pulse: Dependency | None = None) -> None:
        self.deltas: list[Delta] = []
        self.batches: list[int] = []
        """How many deltas came at a time."""
        self.news = threading.Condition()
        self.error: BaseException | None = None
        self.closed = False

        @asynccontextmanager
        async def opened() -> AsyncIterator[Opened]:
            self.engine = make()
            try:
                yield Opened(self.engine, None if pulse is None else pulse.check)
            finally:
                self.closed = True

        self.link = StubLink("e", self._emit)
        self.server = EventLoopServer(self.link, opened)  # type: ignore[arg-type]
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Served:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.link.stop()
        self.join()

    def _run(self) -> None:
        try:
            self.server.run()
        except (HeadraceError, ZeroDivisionError) as error:
            self.error = error

    def _emit(self, deltas: list[Delta]) -> None:
        with self.news:
            self.deltas += deltas
            self.batches.append(len(deltas))
            self.news.notify_all()

    def tokens(self, name: str) -> list[int]:
        return [int(token) for delta in list(self.deltas) if delta.id == name for token in delta.token_ids]

    def finishes(self) -> dict[str, str | None]:
        return {delta.id: delta.finish for delta in list(self.deltas) if delta.finish is not None}

    def until(self, holds: Callable[[], object]) -> None:
        with self.news:
            assert self.news.wait_for(holds, timeout=SECONDS)

    def join(self) -> None:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive() and self.closed


def ask(name: str, tokens: int = 5) -> Request:
    return Request(id=name, token_ids=np.arange(1, 4, dtype=np.int32), sampling=Sampling(max_tokens=tokens))


def slow() -> FakeEngine:
    return FakeEngine(version=0, token_seconds=0.001)


def test_what_was_asked_before_there_is_an_engine_is_answered() -> None:
    served = Served(slow)
    served.link.submit([ask("a"), ask("b")])
    scored = served.link.score(np.arange(1, 5, dtype=np.int32))
    with served:
        served.until(lambda: served.finishes() == {"a": "length", "b": "length"})
        assert len(served.tokens("a")) == 5 and len(scored.result(SECONDS)) == 3


def test_deltas_that_come_together_leave_together() -> None:
    with Served(lambda: FakeEngine(version=0, token_seconds=0.0)) as served:
        served.link.submit([ask(f"{i}", 40) for i in range(8)])
        served.until(lambda: len(served.finishes()) == 8)
    assert sum(served.batches) == 8 * 40 and len(served.batches) < 8 * 40 / 4


def test_an_abort_reaches_what_was_submitted_just_before() -> None:
    with Served(slow) as served:
        served.link.submit([ask("a", 100_000)])
        served.link.abort(["a"])
        served.until(lambda: served.finishes() == {"a": "aborted"})


def test_a_stop_ends_every_request_and_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engines.serving.CLOSE_SECONDS", 0.1)  # how long a stop waits for a load
    served = Served(lambda: FakeEngine(load_seconds=1000.0))
    with served:
        served.link.submit([ask("a")])
        loading = served.link.load(FakeEngine().policy.manifest(1))
    assert served.finishes() == {"a": "failed"} and served.error is None
    with pytest.raises(HeadraceError, match="engine e has stopped"):
        loading.result(0)
    assert served.link.phase == "stopping"


def test_an_engine_that_is_lost_says_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engines.serving.WATCH_SECONDS", 0.005)
    pulse = Dependency()
    with Served(slow, pulse) as served:
        served.link.submit([ask("a", 100_000)])
        served.until(lambda: len(served.tokens("a")) > 20)
        asked = served.link.load(served.engine.policy.manifest(0))
        assert not asked.result(SECONDS).accepted, "while it is there, a rejection is an answer"
        pulse.lost.set()
        served.join()
        assert isinstance(served.error, PeerDied) and str(served.error) == "the server died: pulled out"
        assert served.finishes() == {} and served.tokens("a")
        count = len(served.deltas)
        late = served.link.score(np.arange(3, dtype=np.int32))
        served.link.submit([ask("late")])
        assert not late.done() and len(served.deltas) == count


@pytest.mark.parametrize("what", ["request", "rejection", "error"])
def test_what_fails_for_want_of_a_server_is_not_answered(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the loss is noticed only because something failed."""
    monkeypatch.setattr("headrace.engines.serving.WATCH_SECONDS", 1000.0)
    pulse = Dependency()

    class Failing(FakeEngine):
        async def score(self, token_ids: Any) -> Any:
            raise DeadlineError("no answer")

    with Served(lambda: Failing(version=0, fail_requests={"bad": 3}), pulse) as served:
        assert pulse.checked.wait(SECONDS)
        pulse.lost.set()
        asked = None
        if what == "request":
            served.link.submit([ask("bad")])
        elif what == "rejection":
            asked = served.link.load(FakeEngine().policy.manifest(0))
        else:
            asked = served.link.score(np.arange(3, dtype=np.int32))
        served.join()
        assert isinstance(served.error, PeerDied)
        assert served.finishes() == {} and (asked is None or not asked.done())
        assert what != "request" or len(served.tokens("bad")) == 3, "what was drawn is kept"


def test_an_error_of_the_engines_code_ends_the_process_after_everybody_was_told() -> None:
    class Buggy(FakeEngine):
        async def score(self, token_ids: Any) -> Any:
            return 1 / 0

    with Served(lambda: Buggy(version=0, token_seconds=0.001)) as served:
        served.link.submit([ask("a", 100_000)])
        served.until(lambda: served.tokens("a"))
        scored = served.link.score(np.arange(3, dtype=np.int32))
        served.join()
        assert isinstance(served.error, ZeroDivisionError)
        assert served.finishes() == {"a": "failed"}
        with pytest.raises(HeadraceError, match="engine e died of ZeroDivisionError: division by zero"):
            scored.result(0)


def test_an_engine_that_gives_no_last_delta_fails_that_request_alone() -> None:
    class Forgetful(FakeEngine):
        async def generate(self, request: Request) -> AsyncIterator[Delta]:
            async for delta in super().generate(request):
                if delta.finish is None or request.id == "good":
                    yield delta

    with Served(lambda: Forgetful(version=0)) as served:
        served.link.submit([ask("bad"), ask("good")])
        served.until(lambda: len(served.finishes()) == 2)
        assert served.finishes() == {"bad": "failed", "good": "length"}
        assert "gave request bad no last delta" in next(delta.error for delta in served.deltas if delta.error)

"""One session is one rollout: its turns are sampled one after the other, within its budget, until it has a reward.

Nothing that a client does in one session affects another: each has its own tokens, budget, noise and reward.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.engines.base import Sampling
from headrace.gateway.base import ApiError, Chat, Reward
from headrace.gateway.conversation import Conversation
from headrace.types import Prompt, Trace


@dataclass(kw_only=True, eq=False)
class Session:
    """One agent's session. `close` ends the session and the requests that it has in flight."""

    chat: Chat
    prompt: Prompt
    sampling: Sampling
    """The sampling of every turn. `max_tokens` is the budget over all turns; `seed` seeds every turn."""
    max_turns: int
    group: str = ""
    priority: int = 0
    listen: Callable[[int, int, Trace], None] | None = None
    """This function gets the tokens of every turn (see `Conversation`)."""
    requests: int = 0
    """The number of requests so far, answered or in flight."""
    exhausted: bool = False
    """Whether a request was refused, or cut, because the budget was used up."""
    failure: str = ""
    """Why the engines could not answer; empty if they could."""
    deadline: float | None = None
    """When the session times out, on the clock of `time.monotonic`; None until an agent has started."""

    def __post_init__(self) -> None:
        self.id = secrets.token_hex(8)
        self.conversation = Conversation(self.chat, self.listen)
        self.taken = asyncio.Event()
        """Set when an agent has started to work in this session."""
        self.reward: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self._lock = asyncio.Lock()
        """Held by the request that is currently answered."""
        self._running: set[asyncio.Task[object]] = set()
        self._closed = False

    @property
    def budget(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.sampling.max_tokens - self.conversation.sampled

    def begin(self, timeout: float) -> None:
        """Start the session's time, because an agent starts to work."""
        self.deadline = time.monotonic() + timeout
        self.taken.set()

    def seconds_left(self) -> float | None:
        """Return the seconds until the session times out; None before an agent has started."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def check_budget(self, choices: int) -> int:
        """Return how many tokens each of `choices` answers may have. Raises `ApiError` when nothing is left."""
        if len(self.conversation.turns) + choices > self.max_turns:
            used, code = f"{self.max_turns} turns ([rollouts] max_turns)", "turns_exceeded"
        elif self.budget < choices:
            used, code = f"{self.sampling.max_tokens} tokens ([rollouts] max_tokens)", "context_length_exceeded"
        else:
            return self.budget // choices
        self.exhausted = True
        raise ApiError(400, f"the session has used its {used}", code=code)

    def settle(self, reward: Reward) -> None:
        """Accept the reward, once. Raises `ApiError`."""
        if problem := reward.problem():
            raise ApiError(400, problem, param="reward")
        if self.reward.done():
            raise ApiError(409, f"session {self.id} already has its reward")
        self.reward.set_result(reward)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Answer a request in the body of the `with` statement, one request at a time.

        Raises `TimeoutError` when the session times out. `close` cancels the task of the request.
        """
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            async with asyncio.timeout(self.seconds_left()), self._lock:
                yield
        finally:
            self._running.discard(task)

    @property
    def over(self) -> bool:
        """Whether the session takes no more requests."""
        return self._closed or self.reward.done()

    def close(self) -> None:
        """End the session and cancel its requests in flight. Idempotent."""
        self._closed = True
        for task in self._running:
            task.cancel()


class Sessions:
    """The open sessions by id, and those that wait for an agent from outside."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._offered = asyncio.Queue[Session]()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session, *, offered: bool = False) -> None:
        """Open a session. An agent from outside may take an offered session."""
        self._open[session.id] = session
        if offered:
            self._offered.put_nowait(session)

    def get(self, id: str) -> Session:
        """Return the open session with this id. Raises `ApiError`."""
        session = self._open.get(id)
        if session is None:
            raise ApiError(404, f"there is no open session {id[:40]!r} (it may have ended)", code="session_not_found")
        return session

    async def take(self, wait: float, timeout: float) -> Session | None:
        """Take the session that has been offered longest, and start its time. Returns None after `wait` seconds."""
        try:
            async with asyncio.timeout(wait):
                session = await self._offered.get()
                while session.over:
                    session = await self._offered.get()
        except TimeoutError:
            return None
        session.begin(timeout)
        return session

    def remove(self, session: Session) -> None:
        """Close a session. Its id is no longer valid. Idempotent."""
        self._open.pop(session.id, None)
        session.close()

    def close(self) -> None:
        """Close all sessions."""
        for session in list(self._open.values()):
            self.remove(session)

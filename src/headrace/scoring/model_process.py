"""The model of a scorer in a worker process of its own, as the controller sees the process.

Supervision starts the process, watches it and restarts it. A scorer owns one `ModelProcess` and asks it questions. Any
number of questions are open at the same time, and they are answered in any order.

If the process dies, the questions that it held fail at once. While it is away, later questions fail as `Unreachable`,
so that scorers ask them again until the process is back. A process that lives but answers nothing `hangs`, and is then
ended and restarted. The run goes on meanwhile.
"""

import asyncio
import time
from typing import TypeVar

from headrace.channel.codec import Message
from headrace.channel.hub import Hub
from headrace.engines.serving import Deltas, RemoteEngine
from headrace.errors import ChannelError, DeadlineError, PeerDied
from headrace.scoring.asking import Unreachable
from headrace.scoring.base import ScoreError

M = TypeVar("M", bound=Message)

ROLE = "scorer"
"""The role of these processes. They are called `scorer-0`, `scorer-1`, ..., in the order of `Config.scorer_models`."""
READY_SECONDS = 1.0
"""How long one attempt at a question waits for a process that is away."""
HANGS_AFTER = 2
"""A process hangs when so many questions in a row were not answered in time, each of them asked after the one before it
was given up, and no other question was answered meanwhile."""


class ModelProcess:
    """The process of one scorer's model. Used from the controller's event loop only."""

    def __init__(self, name: str, *, timeout: float) -> None:
        """`name` is that of the process. `timeout` limits every question, in seconds."""
        self.name = name
        self.timeout = timeout
        self._hub: Hub | None = None
        self._serving = asyncio.Event()
        self._reason = ""
        self._late = 0
        self._late_since = 0.0
        """When the last of the questions that `_late` counts was given up."""

    @property
    def hangs(self) -> bool:
        """Whether the process should be ended, because it answers nothing."""
        return self._late >= HANGS_AFTER

    def answered(self) -> None:
        """Note that the process has answered a question, or a part of one."""
        self._late = 0

    def late(self, asked: float) -> None:
        """Note that a question of this moment was given up. Of questions that were open together, one is counted."""
        if asked >= self._late_since:
            self._late += 1
            self._late_since = time.monotonic()

    def connect(self, hub: Hub) -> None:
        """Use this hub from now on. The process is ready."""
        self._hub = hub
        self.back()

    def back(self) -> None:
        """Note that the process is ready, for the first time or again."""
        self._late = 0
        self._serving.set()

    @property
    def serves(self) -> bool:
        """Whether the process is ready now."""
        return self._serving.is_set()

    def lost(self, reason: str) -> None:
        """Note that the process is gone. Its open questions fail; later ones wait until it is back."""
        self._serving.clear()
        self._reason = reason
        self._late = 0

    def hear(self, message: Message) -> None:
        """Take a message that answers no question. A kind of scorer whose process sends such messages overrides it."""

    async def ready(self) -> Hub:
        """Wait a moment until the process serves. Raises `Unreachable` if it is away for longer."""
        try:
            async with asyncio.timeout(READY_SECONDS):
                await self._serving.wait()
        except TimeoutError:
            why = f" (it died: {self._reason})" if self._reason else ""
            raise Unreachable(f"{self.name} is not ready{why}") from None
        assert self._hub is not None
        return self._hub

    async def ask(self, message: Message, reply: type[M]) -> M:
        """Ask a question and return its answer.

        Raises `ScoreError` if the process is away, dies, takes longer than the time limit or answers with an error.
        """
        hub = await self.ready()
        asked = time.monotonic()
        try:
            answer = await hub.request(self.name, message, reply, timeout=self.timeout)
        except PeerDied as error:
            raise ScoreError(f"{self.name} died: {error.reason}") from error
        except DeadlineError:
            self.late(asked)
            raise ScoreError(f"{self.name} took more than {self.timeout:g} s") from None
        except ChannelError as error:
            self.answered()
            raise ScoreError(str(error)) from error
        self.answered()
        return answer

    async def tell(self, message: Message) -> None:
        """Send a message that needs no answer. It comes after earlier ones, and is dropped if the process is gone."""
        if self._hub is not None and self._serving.is_set():
            try:
                await self._hub.send(self.name, message)
            except PeerDied:
                return


class ModelEngine(ModelProcess):
    """The process of a scorer whose model is served by an engine of ours."""

    _engine: RemoteEngine | None = None

    def __init__(self, name: str, *, timeout: float, load_deadline: float | None = None) -> None:
        """See `ModelProcess`. `load_deadline` limits how long new weights may take, by default `timeout`."""
        super().__init__(name, timeout=timeout)
        self._load_deadline = timeout if load_deadline is None else load_deadline

    def connect(self, hub: Hub) -> None:
        """See `ModelProcess.connect`."""
        self._engine = RemoteEngine(hub, self.name, load_deadline=self._load_deadline, token_deadline=self.timeout)
        super().connect(hub)

    async def engine(self) -> RemoteEngine:
        """Return the engine, as soon as it serves. Raises `Unreachable` if it is away."""
        await self.ready()
        assert self._engine is not None
        return self._engine

    def hear(self, message: Message) -> None:
        """Hand new tokens to the requests that wait for them."""
        if self._engine is not None and isinstance(message, Deltas):
            self.answered()
            self._engine.deliver(message.deltas)

    def lost(self, reason: str) -> None:
        """See `ModelProcess.lost`."""
        super().lost(reason)
        if self._engine is not None:
            self._engine.lost(f"{self.name} died: {reason}")

    def back(self) -> None:
        """See `ModelProcess.back`."""
        if self._engine is not None:
            self._engine.back()
        super().back()

"""The controller's side of the gateway: it opens and closes sessions, and passes requests to the engines.

    AgentEpisode ──open, close──▶ Relay ──▶ the process of the gateway
    engines ◀──requests── Relay ◀──Ask──┘

The relay keeps a copy of every session's conversation, turn by turn. If the process of the gateway dies, its sessions
fail with this as the reason, and its requests are withdrawn from the engines. Sessions in which no agent works yet are
opened again when the process is back, at the same address.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from headrace.channel.codec import Message
from headrace.engines.base import Delta, Request, Sampling, closing_deltas, failed_delta
from headrace.errors import ChannelError, DeadlineError, HeadraceError, PeerDied, UserError
from headrace.gateway.agent_main import Job
from headrace.gateway.agents import AgentPool
from headrace.gateway.base import GATEWAY_DIED, Chat, GatewayHandle, Reward, TokenSource, base_url
from headrace.gateway.messages import (
    Ask,
    Close,
    Closed,
    FromGateway,
    Limited,
    Listen,
    Listening,
    Open,
    Opened,
    Recorded,
    Rewarded,
    Said,
    Sampled,
    Taken,
    ToGateway,
    Withdraw,
)
from headrace.gateway.session import Conversation, Opening, new_key
from headrace.types import NO_VERSION, Prompt, Trace

KEY_VARIABLE = "HEADRACE_GATEWAY_KEY"
LISTEN_SECONDS = 30.0
"""Seconds in which the gateway must listen. After a restart, its port may be in use for a moment."""
LISTEN_PAUSE = 0.5

M = TypeVar("M", bound=Message)


class Wire(Protocol):
    """What the relay needs of a `channel.hub.Hub`."""

    async def send(self, peer: str, message: Message) -> None:
        """See `Hub.send`."""

    async def request(self, peer: str, message: Message, reply: type[M], *, timeout: float) -> M:
        """See `Hub.request`."""


@dataclass(kw_only=True, eq=False)
class AgentSession:
    """The controller's copy of a session: what was sampled in it, and how it ended."""

    chat: Chat
    prompt: Prompt
    sampling: Sampling
    group: str = ""
    priority: int = 0
    version: int = NO_VERSION
    """The only version that may answer; `NO_VERSION` if any version may."""
    listen: Callable[[int, int, Trace], None] | None = None
    """This function gets the tokens of every turn (see `Conversation`)."""
    offered: bool = False
    """Whether agents from outside may take the session."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=new_key)
    exhausted: bool = False
    """Whether a request was refused, or cut, because the budget was used up."""
    failure: str = ""
    """Why the engines could not answer; empty if they could."""

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.chat, self.listen)
        self.opened = asyncio.Event()
        """Set while requests with the session's key are answered."""
        self.taken = asyncio.Event()
        """Set when an agent works in the session."""
        self.closed = asyncio.Event()
        self.outcome: asyncio.Future[Reward | str] = asyncio.get_running_loop().create_future()
        """The reward that was posted, or why there will be none: the gateway died."""

    @property
    def lost(self) -> str:
        """Why the session was lost with the process of the gateway; empty if it was not."""
        outcome = self.outcome.result() if self.outcome.done() else ""
        return outcome if isinstance(outcome, str) else ""

    def traces(self) -> list[Trace]:
        """Return the traces of the conversation, with the temperature at which their tokens were sampled."""
        temperature = self.sampling.recorded_temperature
        traces = self.conversation.traces()
        return [msgspec.structs.replace(trace, temperatures=[(len(trace), temperature)]) for trace in traces]

    def end(self, outcome: Reward | str) -> None:
        """Set the outcome, once."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def record(self, turn: Recorded) -> None:
        """Record a turn as the gateway has recorded it."""
        turns = self.conversation.turns
        parent = turns[turn.parent] if turn.parent >= 0 else None
        opening = turns[-1].opening if turn.shared else Opening(parent, np.frombuffer(turn.context, np.int32))
        self.conversation.record(
            opening,
            np.frombuffer(turn.sampled, np.int32),
            np.frombuffer(turn.logprobs, np.float32),
            np.frombuffer(turn.versions, np.int32),
            {"content": ""},
        )


@dataclass(eq=False)
class Relay(GatewayHandle):
    """The gateway of a run, as the controller sees it."""

    name: str
    """The name of the process."""
    wire: Wire
    engine: TokenSource
    chat: Chat
    _: KW_ONLY
    model: str
    bind: str = "127.0.0.1"
    port: int = 0
    """The port; 0 takes a free port, which is kept from then on."""
    key: str = field(default_factory=new_key)
    max_turns: int
    session_seconds: float
    """Seconds in which a session must have its reward."""
    agents: AgentPool | None = None
    """The run's own agents. None means that sessions are offered to agents from outside."""
    file: Path | None = None
    """This file gets the address and the key."""
    note: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        self._serving = asyncio.Event()
        self._bell = asyncio.Event()
        self._items: list[Open | Close | Sampled] = []
        self._sessions: dict[str, AgentSession] = {}
        self._unanswered: dict[str, float] = {}
        """Session -> since when the gateway has not answered its `Open` or `Close`."""
        self._requests: dict[str, asyncio.Task[None]] = {}

    @property
    def base_url(self) -> str:
        """The base URL for an `openai.OpenAI` client. If `port` is 0, the URL is right only after `start`."""
        return base_url(self.bind, self.port)

    @property
    def serving(self) -> bool:
        """Whether the process listens."""
        return self._serving.is_set()

    @property
    def open_sessions(self) -> int:
        """The number of open sessions."""
        return len(self._sessions)

    async def start(self) -> None:
        """Make the process listen, and report the address. Raises `UserError` if the port is in use."""
        try:
            await self._listen()
        except (PeerDied, DeadlineError):
            raise
        except ChannelError as error:
            raise UserError(str(error).removeprefix(f"{self.name}: ")) from error
        where = ""
        if self.file is not None:
            _write_private(self.file, msgspec.json.encode({"base_url": self.base_url, "api_key": self.key}))
            where = f", its key is in {self.file}"
        self.note(f"the gateway listens at {self.base_url}{where}")

    async def run(self) -> None:
        """Serve until cancelled: pass requests on, and send items to the process, as many at a time as have come."""
        async with asyncio.TaskGroup() as self._tasks:
            while True:
                await self._bell.wait()
                self._bell.clear()
                items, self._items = self._items, []
                if items:
                    with suppress(PeerDied):  # `lost` takes care of the sessions.
                        await self.wire.send(self.name, ToGateway(items=items))

    def close(self) -> None:
        """Withdraw all requests. Idempotent. The process itself belongs to its launcher."""
        self._withdraw_all()
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    # ---- sessions

    def open(self, session: AgentSession) -> None:
        """Open a session. `session.opened` is set when requests with its key are answered.

        While the process is away this takes longer. Supervision sets a deadline for its return.
        """
        self._sessions[session.id] = session
        if self.serving:
            self._put_open(session)

    async def settle(self, session: AgentSession) -> None:
        """Close a session, and return when everything that was recorded in it has arrived."""
        if session.id in self._sessions and not session.lost:
            self._unanswered[session.id] = time.monotonic()
            self._put(Close(session=session.id))
            await session.closed.wait()
        self.forget(session)

    def forget(self, session: AgentSession) -> None:
        """Close a session without waiting. Idempotent."""
        known = self._sessions.pop(session.id, None)
        self._unanswered.pop(session.id, None)
        if known is not None and not session.closed.is_set():
            self._put(Close(session=session.id))

    def job(self, session: AgentSession) -> Job:
        """Return what an agent is told about its session."""
        prompt = session.prompt
        return Job(
            base_url=self.base_url,
            api_key=session.key,
            model=self.model,
            session=session.id,
            prompt=prompt.id,
            messages=prompt.messages or [],
            text=prompt.text,
            data=prompt.data,
        )

    # ---- the process

    def hear(self, message: Message) -> None:
        """Handle all items of a `FromGateway`."""
        assert isinstance(message, FromGateway)
        for item in message.items:
            match item:
                case Ask(request=request, whole=whole):
                    task = self._tasks.create_task(self._sample(request, whole), name=f"request {request.id}")
                    self._requests[request.id] = task
                case Withdraw(request_id=id):
                    if id in self._requests:
                        self._requests[id].cancel()
                case Said(line=line):
                    self.note(line)
                case _:
                    if session := self._sessions.get(item.session):
                        self._hear_of(session, item)

    def _hear_of(self, session: AgentSession, item: Opened | Closed | Taken | Recorded | Limited | Rewarded) -> None:
        match item:
            case Opened():
                self._unanswered.pop(session.id, None)
                session.opened.set()
            case Closed():
                self._unanswered.pop(session.id, None)
                session.closed.set()
            case Taken():
                session.taken.set()
            case Recorded():
                session.record(item)
            case Limited():
                session.exhausted = session.exhausted or item.exhausted
                session.failure = session.failure or item.failure
            case Rewarded(reward=reward):
                session.end(reward)

    def lost(self, reason: str) -> None:
        """Fail the sessions in which agents work, because the process died. The others wait for its return."""
        self._serving.clear()
        self._items.clear()
        self._unanswered.clear()
        self._withdraw_all()
        for session in self._sessions.values():
            session.opened.clear()
            if session.taken.is_set():
                session.end(f"{GATEWAY_DIED} ({reason})")
                session.closed.set()

    async def back(self) -> None:
        """Make a restarted process listen at the same address, and open the sessions that waited for it.

        Raises `PeerDied` if the process dies meanwhile, and `HeadraceError` if the port stays in use.
        """
        began = time.monotonic()
        while not self._serving.is_set():
            try:
                await self._listen()
            except (PeerDied, DeadlineError):
                raise
            except ChannelError as error:
                if time.monotonic() - began > LISTEN_SECONDS:
                    raise HeadraceError(f"the gateway was started again, but cannot listen: {error}") from error
                await asyncio.sleep(LISTEN_PAUSE)
        for session in self._sessions.values():
            if not session.taken.is_set():
                self._put_open(session)

    def silent_for(self) -> float:
        """Return for how many seconds the process has not answered; 0 if it owes no answer."""
        return time.monotonic() - min(self._unanswered.values()) if self._unanswered else 0.0

    async def _listen(self) -> None:
        listen = Listen(port=self.port, key=self.key)
        self.port = (await self.wire.request(self.name, listen, Listening, timeout=LISTEN_SECONDS)).port
        self._serving.set()

    def _put_open(self, session: AgentSession) -> None:
        self._unanswered[session.id] = time.monotonic()
        self._put(
            Open(
                session=session.id,
                key=session.key,
                sampling=session.sampling,
                max_turns=self.max_turns,
                seconds=self.session_seconds,
                group=session.group,
                priority=session.priority,
                version=session.version,
                offered=msgspec.json.encode(session.prompt) if session.offered else b"",
            )
        )

    def _put(self, item: Open | Close | Sampled) -> None:
        if self._serving.is_set():
            self._items.append(item)
            self._bell.set()

    async def _sample(self, request: Request, whole: bool) -> None:
        held: list[Delta] = []
        try:
            # Closing this iterator early also closes the engine's iterator, which aborts the request in the engine.
            async with closing_deltas(self.engine.generate(request)) as deltas:
                async for delta in deltas:
                    held.append(delta)
                    if delta.finish is not None or not whole:
                        self._put(Sampled.of(held))
                        held.clear()
        except HeadraceError as error:
            self._put(Sampled.of([*held, failed_delta(request.id, str(error))]))
        finally:
            self._requests.pop(request.id, None)

    def _withdraw_all(self) -> None:
        for task in self._requests.values():
            task.cancel()


def checked_key(key: str) -> str:
    """Return a key that the user chose. Raises `UserError` if it is not a valid key."""
    if len(key) < 16 or any(c.isspace() for c in key) or not key.isascii():
        raise UserError(f"{KEY_VARIABLE}: a key is at least 16 ASCII characters, without spaces")
    return key


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
        file.write(content + b"\n")

"""One session is one rollout: its turns are sampled one after the other, within its budget, until it has a reward.

Nothing that a client does in one session affects another: each has its own tokens, budget, noise and reward.

Sampled tokens stay as they were sampled, whatever text a client sends back. If a request's history matches a recorded
turn, the request continues from that turn's own tokens, and only the messages after it are rendered. If a client edits
its history, the token stream forks at the last turn that the client left unchanged. Every sampled token is trained in
exactly one trace. In other traces it is context, with its recorded log-probability and version.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np

from headrace.engines.base import Sampling
from headrace.gateway.base import ApiError, Chat, Message, Reward, Tools
from headrace.gateway.messages import FromGatewayItem, Limited, Recorded, Rewarded, Taken
from headrace.gateway.openai_format import StreamedAnswer
from headrace.scoring.base import Turn as PlacedTurn
from headrace.types import NO_VERSION, Float32Array, Int32Array, Prompt, Trace

History = tuple[str, ...]
"""The messages of a conversation, each as canonical JSON. The first element is the tools that were offered."""

NOTHING = Trace.of_context(np.zeros(0, np.int32))
"""A trace without tokens."""
WAITING = 32
"""The most requests that a session may have at the same time, of which one is answered."""
_COMPARED = ("role", "content", "tool_calls", "tool_call_id", "name")
_ENCODER = msgspec.json.Encoder(order="deterministic")


@dataclass(frozen=True, eq=False)
class Opening:
    """The start of a request: the tokens that the policy continues."""

    parent: ConversationTurn | None
    """The turn that the request follows; None if no recorded turn matches."""
    context: Int32Array
    """The new tokens since that turn, which were not sampled."""
    history: History = ()
    text: str = ""
    """The prompt text of a plain completion; empty for other requests."""

    @property
    def token_ids(self) -> Int32Array:
        """All tokens of the prompt."""
        return self.context if self.parent is None else np.concatenate([self.parent.token_ids, self.context])


@dataclass(frozen=True, eq=False)
class ConversationTurn:
    """One turn of the policy, and everything that came before it."""

    opening: Opening
    sampled: Int32Array
    logprobs: Float32Array
    versions: Int32Array
    token_ids: Int32Array
    """All tokens from the start of the stream to the end of this turn."""
    history: History
    """The history with this turn as its last message; empty for plain completions."""
    text: str
    """The prompt and the answer of a plain completion."""
    ended: bool
    """Whether the policy ended its turn itself, with a stop token."""


class Conversation:
    """The turns of a session, which form a tree."""

    def __init__(self, chat: Chat, listen: Callable[[int, int, Trace], None] | None = None) -> None:
        """Make an empty conversation. `listen` is called with tokens when their turn has ended.

        Its arguments are the turn's number, the position of the first token, and the tokens. Every sampled token is
        reported once, and so is the context that several answers to one request share.
        """
        self._chat = chat
        self._listen = listen
        self.turns: list[ConversationTurn] = []
        """The turns in the order in which they ended."""

    @property
    def sampled(self) -> int:
        """The number of tokens that the policy sampled, over all turns."""
        return sum(len(turn.sampled) for turn in self.turns)

    def open_chat(self, messages: Sequence[Message], tools: Tools = None) -> Opening:
        """Open a chat request. It continues from the longest recorded history that the messages begin with."""
        history = (_ENCODER.encode(tools or []).decode(), *map(_key, messages))
        fitting = [t for t in self.turns if t.history and t.history == history[: len(t.history)]]
        # A request must add something to the history that it continues. Otherwise there is nothing to answer, and the
        # messages are rendered anew.
        parent = max((t for t in fitting if len(t.history) < len(history)), key=lambda t: len(t.history), default=None)
        if parent is None:
            return Opening(None, self._chat.open(messages, tools=tools), history)
        following = messages[len(parent.history) - 1 :]
        return Opening(parent, self._chat.continue_(following, ended=parent.ended, tools=tools), history)

    def open_text(self, prompt: str) -> Opening:
        """Open a plain completion. It continues from the longest recorded text that the prompt begins with."""
        fitting = [t for t in self.turns if t.text and prompt.startswith(t.text)]
        parent = max(fitting, key=lambda t: len(t.text), default=None)
        rest = prompt if parent is None else prompt[len(parent.text) :]
        return Opening(parent, self._chat.encode(rest), text=prompt)

    def open_tokens(self, prompt: Sequence[int]) -> Opening:
        """Open a plain completion of tokens, which are used as they are."""
        token_ids = np.asarray(prompt, np.int32)
        fitting = [t for t in self.turns if np.array_equal(t.token_ids, token_ids[: len(t.token_ids)])]
        parent = max(fitting, key=lambda t: len(t.token_ids), default=None)
        return Opening(parent, token_ids[0 if parent is None else len(parent.token_ids) :])

    def record(
        self,
        opening: Opening,
        sampled: Sequence[int] | Int32Array,
        logprobs: Sequence[float] | Float32Array,
        versions: Sequence[int] | Int32Array,
        answer: Message,
    ) -> ConversationTurn:
        """Record a turn exactly as the engine reported it. `answer` is the message that the client received."""
        turn = ConversationTurn(
            opening=opening,
            sampled=np.array(sampled, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.array(versions, np.int32),
            token_ids=np.concatenate([opening.token_ids, np.asarray(sampled, np.int32)]),
            history=(*opening.history, _key(answer)) if opening.history else (),
            text=opening.text + str(answer["content"]) if opening.text else "",
            ended=len(sampled) > 0 and int(sampled[-1]) in self._chat.stop_token_ids,
        )
        if self._listen is not None:
            number, start = len(self.turns), len(opening.token_ids)
            if not self.turns or self.turns[-1].opening is not opening:
                self._listen(number, start - len(opening.context), Trace.of_context(opening.context))
            self._listen(number, start, NOTHING.extended(turn.sampled, turn.logprobs, turn.versions, trained=True))
        self.turns.append(turn)
        return turn

    def traces(self) -> list[Trace]:
        """Return one trace for each turn that no other turn follows, in the order of those turns."""
        traces = []
        trained: set[int] = set()
        for path in self._paths():
            trace = NOTHING
            for turn in path:
                trace = Trace.joined([trace, Trace.of_context(turn.opening.context)])
                trace = trace.extended(turn.sampled, turn.logprobs, turn.versions, trained=id(turn) not in trained)
                trained.add(id(turn))
            traces.append(trace)
        return traces

    def placed_turns(self) -> list[PlacedTurn]:
        """Return the turns in their order, each with its place in the trace in which it is trained."""
        place: dict[int, int] = {}
        for number, path in enumerate(self._paths()):
            for turn in path:
                place.setdefault(id(turn), number)
        return [
            PlacedTurn(
                place[id(turn)],
                len(turn.token_ids) - len(turn.sampled),
                len(turn.token_ids),
                partial(self._chat.decode, turn.sampled[:-1] if turn.ended else turn.sampled),
            )
            for turn in self.turns
        ]

    def _paths(self) -> list[list[ConversationTurn]]:
        """Return the turns of each trace, in order: those up to a turn that no other turn follows."""
        followed = {id(turn.opening.parent) for turn in self.turns}
        paths = []
        for leaf in self.turns:
            if id(leaf) not in followed:
                path = [leaf]
                while (parent := path[0].opening.parent) is not None:
                    path.insert(0, parent)
                paths.append(path)
        return paths


def _key(message: Message) -> str:
    """Return a key that identifies a message. Clients send back more fields than they received, most of them empty."""
    compared = {name: message[name] for name in _COMPARED if message.get(name)}
    return _ENCODER.encode(compared).decode()


def new_key() -> str:
    """Return a random API key."""
    return secrets.token_urlsafe(24)


@dataclass(kw_only=True, eq=False)
class Session:
    """One agent's session. `close` ends the session and the requests that it has in flight."""

    chat: Chat
    prompt: Prompt
    sampling: Sampling
    """The sampling of every turn. `max_tokens` is the budget over all turns; `seed` seeds every turn."""
    max_turns: int
    seconds: float
    """Seconds in which the session must have its reward, from the moment at which an agent starts to work."""
    group: str = ""
    priority: int = 0
    version: int = NO_VERSION
    """The only version that may answer; `NO_VERSION` if any version may."""
    tell: Callable[[FromGatewayItem], None] = lambda item: None
    """This function gets everything that the controller has to know of the session."""
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    key: str = field(default_factory=new_key)
    """The API key of this session. It is independent of the run's key and of every other session's."""
    requests: int = 0
    """The number of requests so far, answered or in flight."""
    exhausted: bool = False
    """Whether a request was refused, or cut, because the budget was used up."""
    failure: str = ""
    """Why the engines could not answer; empty if they could."""
    deadline: float | None = None
    """When the session times out, on the clock of `time.monotonic`; None until an agent takes it or makes a request."""

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.chat)
        self.reward: Reward | None = None
        self._lock = asyncio.Lock()
        """Held by the request that is currently answered."""
        self._running: set[asyncio.Task[object]] = set()
        self._closed = False

    @property
    def budget(self) -> int:
        """The number of tokens that may still be sampled."""
        return self.sampling.max_tokens - self.conversation.sampled

    def begin(self) -> None:
        """Start the session's time, because an agent starts to work."""
        self.deadline = time.monotonic() + self.seconds
        self.tell(Taken(session=self.id))

    def record(self, opening: Opening, answers: Sequence[StreamedAnswer]) -> None:
        """Record the answers to one request, as far as they have tokens."""
        turns, shared = self.conversation.turns, False
        for answer in answers:
            if not len(answer):
                continue
            turn = self.conversation.record(
                opening, answer.token_ids, answer.logprobs, answer.versions, answer.message()
            )
            self.tell(
                Recorded(
                    session=self.id,
                    parent=-1 if opening.parent is None else turns.index(opening.parent),
                    shared=shared,
                    context=b"" if shared else opening.context.tobytes(),
                    sampled=turn.sampled.tobytes(),
                    logprobs=turn.logprobs.tobytes(),
                    versions=turn.versions.tobytes(),
                )
            )
            shared = True

    def exhaust(self) -> None:
        """Note that a request was refused, or cut, because the budget was used up."""
        self.exhausted = True
        self.tell(Limited(session=self.id, exhausted=True))

    def fail(self, reason: str) -> None:
        """Note why the engines could not answer."""
        self.failure = reason
        self.tell(Limited(session=self.id, failure=reason))

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
        self.exhaust()
        raise ApiError(400, f"the session has used its {used}", code=code)

    def settle(self, reward: Reward) -> None:
        """Accept the reward, once. Raises `ApiError`."""
        if problem := reward.problem():
            raise ApiError(400, problem, param="reward")
        if self.reward is not None:
            raise ApiError(409, f"session {self.id} already has its reward")
        self.reward = reward
        self.tell(Rewarded(session=self.id, reward=reward))

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Answer a request in the body of the `with` statement, one request at a time.

        Raises `TimeoutError` when the session times out. `close` cancels the task of the request.
        """
        task = asyncio.current_task()
        assert task is not None
        if len(self._running) >= WAITING:
            raise ApiError(429, f"session {self.id} has {WAITING} requests already", code="busy", retry_after=1)
        self._running.add(task)
        if self.deadline is None:
            self.begin()
        try:
            async with asyncio.timeout(self.seconds_left()), self._lock:
                yield
        finally:
            self._running.discard(task)

    @property
    def over(self) -> bool:
        """Whether the session takes no more requests."""
        return self._closed or self.reward is not None

    def close(self) -> None:
        """End the session and cancel its requests in flight. Idempotent."""
        self._closed = True
        for task in self._running:
            task.cancel()


class Sessions:
    """The open sessions by id, and those that wait for an agent from outside."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}
        """The open sessions by the digest of their keys, so that the time of a look-up tells nothing about a key."""
        self._offered = asyncio.Queue[Session]()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session, *, offered: bool = False) -> None:
        """Open a session. An agent from outside may take an offered session."""
        self._open[session.id] = session
        self._by_key[_digest(session.key)] = session
        if offered:
            self._offered.put_nowait(session)

    def find(self, id: str) -> Session | None:
        """Return the open session with this id, or None."""
        return self._open.get(id)

    def get(self, id: str) -> Session:
        """Return the open session with this id. Raises `ApiError`."""
        session = self.find(id)
        if session is None:
            raise ApiError(404, f"there is no open session {id[:40]!r} (it may have ended)", code="session_not_found")
        return session

    def with_key(self, key: str) -> Session | None:
        """Return the open session with this API key, or None."""
        return self._by_key.get(_digest(key))

    async def take(self, wait: float) -> Session | None:
        """Take the session that has been offered longest, and start its time. Returns None after `wait` seconds."""
        try:
            async with asyncio.timeout(wait):
                session = await self._offered.get()
                while session.over:
                    session = await self._offered.get()
        except TimeoutError:
            return None
        session.begin()
        return session

    def remove(self, session: Session) -> None:
        """Close a session. Its id is no longer valid. Idempotent."""
        self._open.pop(session.id, None)
        self._by_key.pop(_digest(session.key), None)
        session.close()

    def close(self) -> None:
        """Close all sessions."""
        for session in list(self._open.values()):
            self.remove(session)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

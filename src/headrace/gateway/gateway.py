"""The gateway of a run: its HTTP server, its sessions, and the episodes that the sessions become.

    GET  /v1/models                        a list with the one model
    GET  /v1/models/{model}                the one model; 404 for any other name
    POST /v1/chat/completions              in a session (recorded) or outside of any (not recorded)
    POST /v1/completions                   the same, for plain text or token ids
    POST /v1/sessions                      take a session that waits for an agent from outside
    POST /v1/sessions/{id}/reward          give a session its reward, which ends the session

A request belongs to a session by the session's own API key, or by the run's key and the header `x-headrace-session`.
A session's key opens nothing but that session. Every request needs one of the keys, also on loopback; without it the
answer is 401. The gateway's address and the run's key are in `gateway.json` in the run directory, which only the file's
owner can read.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from aiohttp import web

from headrace.engines.base import Sampler
from headrace.errors import UserError
from headrace.gateway.agent_main import Job
from headrace.gateway.agents import AgentError, AgentPool
from headrace.gateway.base import ApiError, Chat, Reward
from headrace.gateway.completions import Completions
from headrace.gateway.connections import Bodies, LimitedServer, allowed_connections, drain
from headrace.gateway.openai_format import LARGEST, ChatRequest, ResponseShape, StreamedAnswer, TextRequest, read_body
from headrace.gateway.session import NOTHING, Session, Sessions
from headrace.rollouts.base import AnyEpisode, Cancelled, EpisodePlan
from headrace.scoring.base import Span, Stage, Turn
from headrace.types import Ending, Rollout, Score, Trace

KEY_VARIABLE = "HEADRACE_GATEWAY_KEY"
CLOSE_SECONDS = 2.0
WRITE_SECONDS = 60.0
"""Seconds in which a client must take the next piece of a stream."""
SESSION_HEADER = "x-headrace-session"


class _TakeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    wait: Annotated[float, msgspec.Meta(ge=0, le=300)] = 30.0
    """Seconds to wait for a session."""


class Gateway:
    """The gateway, which serves from `start` to `close`."""

    def __init__(
        self,
        engine: Sampler,
        chat: Chat,
        *,
        model: str,
        bind: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        max_length: int,
        max_tokens: int,
        max_turns: int,
        vocabulary: int = LARGEST,
        stop_token_ids: tuple[int, ...] = (),
        agents: AgentPool | None = None,
        session_seconds: float,
        connections: int = 1024,
        max_body: int = 8 * 2**20,
        queue: int = 1024,
        file: Path | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Make a gateway. `port` 0 takes a free port, and `key` is random unless given. `file` gets address and key."""
        self.key = checked_key(key) if key else secrets.token_urlsafe(24)
        self.sessions = Sessions()
        self.chat = chat
        self.max_turns = max_turns
        self.agents = agents
        """The run's own agents. None means that sessions are offered to agents from outside."""
        self.session_seconds = session_seconds
        """Seconds in which a session must have its reward."""
        self._model = model
        self._bind = bind
        self._port = port
        self._file = file
        self._note = note
        self._started = int(time.time())
        self._connections = connections
        self._bodies = Bodies(max_body)
        self._runner: web.ServerRunner | None = None
        self._completions = Completions(
            engine=engine,
            chat=chat,
            max_length=max_length,
            max_tokens=max_tokens,
            vocabulary=vocabulary,
            stop_token_ids=stop_token_ids,
            note=note,
            queue=queue,
        )

    @property
    def base_url(self) -> str:
        """The base URL for an `openai.OpenAI` client. If `port` is 0, the URL is right only after `start`."""
        host = f"[{self._bind}]" if ":" in self._bind else self._bind
        return f"http://{host}:{self._port}/v1"

    async def start(self) -> None:
        """Listen, and report the address. Raises `UserError` if the port is in use."""
        server = LimitedServer(self._answer, allowed_connections(self._connections))
        self._runner = web.ServerRunner(server, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._bind, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            self._runner = None
            raise UserError(f"[gateway] port: cannot listen on {self._bind}:{self._port}: {error.strerror}") from error
        self._sweep = asyncio.create_task(server.sweep(), name="close idle connections")
        self._port = self._runner.addresses[0][1]
        where = ""
        if self._file is not None:
            _write_private(self._file, msgspec.json.encode({"base_url": self.base_url, "api_key": self.key}))
            where = f", its key is in {self._file}"
        self._note(f"the gateway listens at {self.base_url}{where}")

    async def watch(self) -> None:
        """Raise the error that ends the gateway's own task, if one does. The caller owns this wait."""
        await self._sweep

    async def close(self) -> None:
        """End every session and stop listening. Idempotent."""
        self.sessions.close()
        if self._runner is not None:
            self._sweep.cancel()
            await self._runner.cleanup()
            self._runner = None
        self._completions.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def episode(self, plan: EpisodePlan, scoring: Stage | None = None) -> AgentEpisode:
        """See `EpisodeMaker`."""
        return AgentEpisode(plan, self, scoring)

    def job(self, session: Session) -> Job:
        """Return what an agent is told about its session."""
        prompt = session.prompt
        return Job(
            base_url=self.base_url,
            api_key=session.key,
            model=self._model,
            session=session.id,
            prompt=prompt.id,
            messages=prompt.messages or [],
            text=prompt.text,
            data=prompt.data,
        )

    # ---- endpoints

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request. A client without a valid key is not read any further."""
        known = False
        try:
            session = self._session_of(request)
            known = True
            return await self._route(request, session)
        except ApiError as error:
            answer = _json(error.body(), status=error.status)
            if error.retry_after is not None:
                answer.headers["retry-after"] = str(error.retry_after)
        if not request.content.is_eof():
            await drain(request)
        if not known or not request.content.is_eof():
            answer.force_close()
        return answer

    async def _route(self, request: web.BaseRequest, session: Session | None) -> web.StreamResponse:
        match request.method, request.path.removeprefix("/v1/").split("/"):
            case "GET", ["models"]:
                return _json({"object": "list", "data": [self._described()]})
            case "GET", ["models", *name]:
                if "/".join(name) != self._model:
                    raise ApiError(404, f"there is one model here: {self._model!r}", code="model_not_found")
                return _json(self._described())
            case "POST", ["chat", "completions"]:
                async with self._bodies.read(request) as body:
                    return await self._complete(request, read_body(body, ChatRequest), session)
            case "POST", ["completions"]:
                async with self._bodies.read(request) as body:
                    return await self._complete(request, read_body(body, TextRequest), session)
            case "POST", ["sessions"]:
                if session is not None:
                    raise ApiError(403, "the key of a session cannot take another session")
                async with self._bodies.read(request) as body:
                    return await self._take(read_body(body or b"{}", _TakeBody))
            case "POST", ["sessions", id, "reward"]:
                async with self._bodies.read(request) as body:
                    return self._reward(id, session, read_body(body, Reward))
            case _:
                raise ApiError(404, f"there is no {request.method[:20]!a} {request.path[:200]!a} here")

    def _described(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._started, "owned_by": "headrace"}

    async def _take(self, body: _TakeBody) -> web.StreamResponse:
        session = await self.sessions.take(body.wait, self.session_seconds)
        if session is None:
            raise ApiError(503, f"no session was open within {body.wait:g} s: ask again", code="no_session")
        prompt, job = session.prompt, self.job(session)
        return _json(
            {
                "id": session.id,
                "api_key": job.api_key,
                "base_url": job.base_url,
                "model": job.model,
                "timeout": self.session_seconds,
                "prompt": {"id": prompt.id, "messages": prompt.messages, "text": prompt.text, "data": prompt.data},
            }
        )

    def _reward(self, id: str, own: Session | None, reward: Reward) -> web.StreamResponse:
        session = self.sessions.get(id)
        if own is not None and own is not session:
            raise ApiError(403, f"the key of session {own.id} cannot give the reward of another one")
        session.settle(reward)
        return _json({"id": session.id, "reward": reward.reward})

    async def _complete(
        self, request: web.BaseRequest, want: ChatRequest | TextRequest, session: Session | None
    ) -> web.StreamResponse:
        want.check()
        shape = ResponseShape(want, self.chat)
        if want.stream:
            return await self._stream(request, want, session, shape)
        return _json(shape.whole(await self._completions.answer(want, session)))

    async def _stream(
        self, request: web.BaseRequest, want: ChatRequest | TextRequest, session: Session | None, shape: ResponseShape
    ) -> web.StreamResponse:
        """Answer with server-sent events. No status is sent before the first event, so a refusal can have its own."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        turn = asyncio.Lock()

        async def write(chunk: bytes) -> None:
            # A client that reads nothing must not hold its connection for ever. The timeout ends as if it had left.
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(chunk)
            except TimeoutError:
                raise ConnectionResetError("the client does not read its answer") from None

        async def open_() -> None:
            if not response.prepared:
                await response.prepare(request)
                for number in range(want.choices if isinstance(want, ChatRequest) else 0):
                    await write(_event(shape.first(number)))

        async def say(number: int, text: str, streamed: StreamedAnswer) -> None:
            async with turn:  # Choices are sampled at the same time; their events must not mix.
                await open_()
                for chunk in shape.piece(number, text, streamed):
                    await write(_event(chunk))

        try:
            answered = await self._completions.answer(want, session, say)
            await open_()
            if want.stream_options is not None and want.stream_options.include_usage:
                await write(_event(shape.last(answered)))
        except ApiError as error:
            if not response.prepared:
                raise
            await write(_event(error.body()))
        except ConnectionError:
            # The client has disconnected. In a session the tokens so far are recorded, because it may have read them.
            request.protocol.force_close()
            return response
        await write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    # ---- authentication

    def _session_of(self, request: web.BaseRequest) -> Session | None:
        """Return the session that a request belongs to, if any. Raises `ApiError` for a request without a valid key."""
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        named = request.headers.get(SESSION_HEADER, "")
        # Headers may hold any bytes. A key that is not ASCII is nobody's key.
        known = key.isascii() and hmac.compare_digest(key, self.key)
        session = self.sessions.with_key(key)
        if not known and session is None:
            raise ApiError(401, "the API key is not that of this run", code="invalid_api_key")
        if session is not None and named and named != session.id:
            raise ApiError(400, f"the API key and {SESSION_HEADER} name two sessions")
        return self.sessions.get(named) if known and named else session


class AgentEpisode(AnyEpisode):
    """One running rollout whose turns an agent takes.

    It ends with the agent's reward, and fails if no reward comes in time. It has the interface of
    `rollouts.turns.Episode`, so groups, ledgers, admission and training see no difference.
    """

    def __init__(self, plan: EpisodePlan, gateway: Gateway, scoring: Stage | None = None) -> None:
        super().__init__(plan)
        self._gateway = gateway
        self._chat = gateway.chat
        self._timeout = gateway.session_seconds
        self._scoring = scoring
        stops = tuple(dict.fromkeys((*self._chat.stop_token_ids, *plan.sampling.stop_token_ids)))
        self._session = Session(
            chat=self._chat,
            prompt=plan.prompt,
            sampling=msgspec.structs.replace(plan.sampling, stop_token_ids=stops),
            max_turns=gateway.max_turns,
            group=plan.group,
            priority=plan.priority,
            listen=self._tell if scoring is not None and scoring.listening else None,
        )
        # An agent's process cannot be resumed, so the tokens that it had in a previous process are of no use.
        self.discarded = sum(trace.trained_tokens for trace in plan.saved)

    @property
    def traces(self) -> Sequence[Trace]:
        """The tokens so far, with one trace for each stream of the agent's turns."""
        return self._session.conversation.traces()

    @property
    def turns(self) -> Sequence[Turn]:
        """See `AnyEpisode.turns`."""
        return self._session.conversation.placed_turns()

    def since(self, start: int) -> Trace | None:
        """Return None, because an agent cannot be resumed; it starts again."""
        return None

    @property
    def answer(self) -> str:
        """Everything after the openings of the traces, as text for people to read."""
        begins = [(trace, np.flatnonzero(trace.trained)) for trace in self.traces]
        return "\n\n".join(self._chat.decode(trace.token_ids[at[0] :]) for trace, at in begins if len(at))

    async def prepare(self) -> None:
        """Do nothing, because an agent opens its conversation itself."""

    async def run(self) -> Rollout:
        """Run an agent until it has its reward."""
        try:
            outcome = await self.interruptible(self._work(self._session))
        except Cancelled:
            return self._rollout("aborted", reason=self.cancelled or "")
        finally:
            self._gateway.sessions.remove(self._session)
        return self._ended(self._session, outcome)

    async def discard(self) -> None:
        """See `AnyEpisode.discard`."""
        self._gateway.sessions.remove(self._session)
        if self._scoring is not None:
            self._scoring.forget(self.id)

    def _tell(self, turn: int, start: int, tokens: Trace) -> None:
        """Pass tokens to the scorers after their turn has ended."""
        if self._scoring is not None and len(tokens):
            self._scoring.span(Span(self.id, None, turn, start, tokens, self._chat.decode))

    async def _work(self, session: Session) -> Reward | str:
        """Return the reward, or the reason why there is none."""
        agents = self._gateway.agents
        try:
            if agents is None:
                self._gateway.sessions.add(session, offered=True)
                # This waits without a deadline of its own until an agent takes the session: `[pipeline] stall_seconds`
                # ends the wait.
                await session.taken.wait()
                async with asyncio.timeout(session.seconds_left()):
                    return await asyncio.shield(session.reward)
            async with agents.places:
                self._gateway.sessions.add(session)
                session.begin(self._timeout)
                async with asyncio.timeout(self._timeout):
                    done = await agents.run(self._gateway.job(session))
        except TimeoutError:
            return f"no reward within {self._timeout:g} s ([task] timeout)"
        except AgentError as error:
            return str(error)
        posted = session.reward.result() if session.reward.done() else None
        returned = None if done.reward is None else Reward(reward=done.reward, metrics=done.metrics)
        if posted is not None and returned is not None and posted.reward != returned.reward:
            return f"the agent posted the reward {posted.reward:g} and returned {returned.reward:g}"
        return posted or returned or "the agent ended without a reward"

    def _ended(self, session: Session, outcome: Reward | str) -> Rollout:
        turns = session.conversation.turns
        if isinstance(outcome, Reward):
            if not turns:
                return self._rollout("failed", reason="the agent has a reward, but made no request in its session")
            return self._rollout("truncated" if session.exhausted else "finished", outcome)
        if session.failure:
            return self._rollout("failed", reason=session.failure)
        if session.exhausted and turns:
            # As in every episode, one that was cut before it earned anything gets a reward of 0 and is trained.
            return self._rollout("truncated", Reward(reward=0.0))
        return self._rollout("failed", reason=outcome)

    def _rollout(self, ending: Ending, outcome: Reward | None = None, *, reason: str = "") -> Rollout:
        conversation = self._session.conversation
        traces, turns = conversation.traces(), len(conversation.turns)
        return Rollout(
            id=self.id,
            index=self.index,
            traces=traces or [NOTHING],
            ending=ending,
            reward=None if outcome is None else outcome.reward,
            reason=reason,
            scores=[] if outcome is None else [Score(value=outcome.reward, scorer="agent")],
            metrics={"turns": float(turns), "traces": float(len(traces)), **(outcome.metrics if outcome else {})},
        )


def checked_key(key: str) -> str:
    """Return a key that the user chose. Raises `UserError` if it is not a valid key."""
    if len(key) < 16 or any(c.isspace() for c in key) or not key.isascii():
        raise UserError(f"{KEY_VARIABLE}: a key is at least 16 ASCII characters, without spaces")
    return key


def _write_private(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
        file.write(content + b"\n")


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"

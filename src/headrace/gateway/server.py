"""The HTTP server: OpenAI's endpoints and the sessions of a run, protected by the run's key.

    GET  /v1/models                        a list with the one model
    GET  /v1/models/{model}                the one model; 404 for any other name
    POST /v1/chat/completions              in a session (recorded) or outside of any (not recorded)
    POST /v1/completions                   the same, for plain text or token ids
    POST /v1/sessions                      take a session that waits for an agent from outside
    POST /v1/sessions/{id}/reward          give a session its reward, which ends the session

A request belongs to a session by its API key (`<run key>.<session>`) or by the header `x-headrace-session`. Every
request needs the run's key, also on loopback; without it the answer is 401.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from headrace.errors import UserError
from headrace.gateway.answers import StreamedAnswer
from headrace.gateway.base import ApiError, Chat, Reward
from headrace.gateway.completions import Completions
from headrace.gateway.openai_format import CompletionRequest, ResponseShape, chat_request, completion_request
from headrace.gateway.session import Session, Sessions

LARGEST_BODY = 64 * 2**20
CLOSE_SECONDS = 2.0
SESSION_HEADER = "x-headrace-session"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class TakeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/sessions`."""

    wait: Annotated[float, msgspec.Meta(ge=0, le=300)] = 30.0
    """Seconds to wait for a session."""


class HttpServer:
    """The server, which listens from `start` to `close`."""

    def __init__(
        self,
        completions: Completions,
        sessions: Sessions,
        chat: Chat,
        *,
        key: str,
        model: str,
        bind: str,
        port: int,
        session_seconds: float,
    ) -> None:
        """Make a server; `port` 0 takes a free port. `session_seconds` limits a session that is taken from outside."""
        self._completions = completions
        self._sessions = sessions
        self._chat = chat
        self._key = key
        self._model = model
        self._bind = bind
        self._port = port
        self._session_seconds = session_seconds
        self._started = int(time.time())
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        """The base URL for an `openai.OpenAI` client. If `port` is 0, the URL is right only after `start`."""
        host = f"[{self._bind}]" if ":" in self._bind else self._bind
        return f"http://{host}:{self._port}/v1"

    async def start(self) -> None:
        """Listen. Raises `UserError` if the port is in use."""
        app = web.Application(middlewares=[self._guarded], client_max_size=LARGEST_BODY)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._one_model)
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_post("/v1/completions", self._text_completions)
        app.router.add_post("/v1/sessions", self._take)
        app.router.add_post("/v1/sessions/{id}/reward", self._reward)
        # When a client disconnects, its request is cancelled, and the engines are told.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._bind, self._port)
        try:
            await site.start()
        except OSError as error:
            await self.close()
            raise UserError(f"[gateway] port: cannot listen on {self._bind}:{self._port}: {error.strerror}") from error
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # ---- endpoints

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["model"] != self._model:
            raise ApiError(404, f"there is one model here: {self._model!r}", code="model_not_found")
        return _json(self._described())

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, chat_request(await request.read()))

    async def _text_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, completion_request(await request.read()))

    async def _take(self, request: web.Request) -> web.StreamResponse:
        body = _decode(await request.read() or b"{}", TakeBody)
        session = await self._sessions.take(body.wait, self._session_seconds)
        if session is None:
            raise ApiError(503, f"no session was open within {body.wait:g} s: ask again", code="no_session")
        prompt = session.prompt
        return _json(
            {
                "id": session.id,
                "api_key": self.session_key(session),
                "base_url": self.base_url,
                "model": self._model,
                "timeout": self._session_seconds,
                "prompt": {"id": prompt.id, "messages": prompt.messages, "text": prompt.text, "data": prompt.data},
            }
        )

    async def _reward(self, request: web.Request) -> web.StreamResponse:
        session = self._sessions.get(request.match_info["id"])
        own = self._session_of(request)
        if own is not None and own is not session:
            raise ApiError(403, f"the key of session {own.id} cannot give the reward of another one")
        reward = _decode(await request.read(), Reward)
        session.settle(reward)
        return _json({"id": session.id, "reward": reward.reward})

    def session_key(self, session: Session) -> str:
        """Return the API key with which a client speaks in this session."""
        return f"{self._key}.{session.id}"

    # ---- completions

    async def _complete(self, request: web.Request, want: CompletionRequest) -> web.StreamResponse:
        session = self._session_of(request)
        shape = ResponseShape(want, self._chat)
        if want.stream:
            return await self._stream(request, want, session, shape)

        async def nothing(number: int, text: str, streamed: StreamedAnswer) -> None:
            """Do nothing, because the whole answer is sent at the end."""

        return _json(shape.whole(await self._completions.answer(want, session, nothing)))

    async def _stream(
        self, request: web.Request, want: CompletionRequest, session: Session | None, shape: ResponseShape
    ) -> web.StreamResponse:
        """Answer with server-sent events.

        The status is sent only with the first event, so that a refused request can have its own status.
        """
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        turn = asyncio.Lock()

        async def open_() -> None:
            if not response.prepared:
                await response.prepare(request)
                for number in range(want.n if want.kind == "chat" else 0):
                    await response.write(_event(shape.first(number)))

        async def say(number: int, text: str, streamed: StreamedAnswer) -> None:
            async with turn:  # Choices are sampled at the same time; their events must not mix.
                await open_()
                for chunk in shape.piece(number, text, streamed):
                    await response.write(_event(chunk))

        try:
            answered = await self._completions.answer(want, session, say)
            await open_()
            if want.include_usage:
                await response.write(_event(shape.last(answered)))
        except ApiError as error:
            if not response.prepared:
                raise
            await response.write(_event(error.body()))
        except ConnectionError:
            # The client has disconnected. In a session the tokens so far are recorded, because it may have read them.
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    # ---- authentication

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_key(request)
            return await handler(request)
        except ApiError as error:
            return _json(error.body(), status=error.status)
        except web.HTTPException as error:
            refusal = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
            return _json(refusal.body(), status=error.status)

    def _check_key(self, request: web.Request) -> None:
        key, _, _ = _bearer(request).partition(".")
        if not hmac.compare_digest(key.encode(), self._key.encode()):
            raise ApiError(401, "the API key is not that of this run", code="invalid_api_key")

    def _session_of(self, request: web.Request) -> Session | None:
        _, _, by_key = _bearer(request).partition(".")
        by_header = request.headers.get(SESSION_HEADER, "")
        if by_key and by_header and by_key != by_header:
            raise ApiError(400, f"the API key and {SESSION_HEADER} name two sessions")
        name = by_key or by_header
        return self._sessions.get(name) if name else None

    def _described(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._started, "owned_by": "headrace"}


def _bearer(request: web.Request) -> str:
    return request.headers.get("authorization", "").removeprefix("Bearer ").strip()


def _decode(raw: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the request's body: {error}") from error


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"

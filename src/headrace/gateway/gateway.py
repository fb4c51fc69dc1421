"""The gateway of a run: its HTTP server and its sessions. It runs in a process of its own (`serving`).

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

import asyncio
import hmac
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from headrace.errors import UserError
from headrace.gateway.base import ApiError, Chat, Reward, TokenSource, base_url
from headrace.gateway.completions import Completions
from headrace.gateway.connections import Bodies, LimitedServer, allowed_connections, drain
from headrace.gateway.openai_format import LARGEST, ChatRequest, ResponseShape, StreamedAnswer, TextRequest, read_body
from headrace.gateway.session import Session, Sessions

CLOSE_SECONDS = 2.0
WRITE_SECONDS = 60.0
"""Seconds in which a client must take the next piece of a stream."""
SESSION_HEADER = "x-headrace-session"


class _TakeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    wait: Annotated[float, msgspec.Meta(ge=0, le=300)] = 30.0
    """Seconds to wait for a session."""


class Gateway:
    """The gateway, which serves from `listen` to `close`."""

    def __init__(
        self,
        engine: TokenSource,
        chat: Chat,
        *,
        whole: TokenSource | None = None,
        model: str,
        bind: str = "127.0.0.1",
        max_length: int,
        max_tokens: int,
        vocabulary: int = LARGEST,
        stop_token_ids: tuple[int, ...] = (),
        connections: int = 1024,
        max_body: int = 8 * 2**20,
        queue: int = 1024,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Make a gateway. `note` takes lines for the people who watch the run.

        `whole` answers requests of which nobody reads a part before the end. By default `engine` does.
        """
        self.key = ""
        """The run's key. Without it, nothing but the keys of sessions is valid."""
        self.base_url = ""
        """The base URL for an `openai.OpenAI` client, once the gateway listens."""
        self.sessions = Sessions()
        self.chat = chat
        self._model = model
        self._bind = bind
        self._started = int(time.time())
        self._connections = connections
        self._bodies = Bodies(max_body)
        self._runner: web.ServerRunner | None = None
        self._completions = Completions(
            engine=engine,
            whole=whole or engine,
            chat=chat,
            max_length=max_length,
            max_tokens=max_tokens,
            vocabulary=vocabulary,
            stop_token_ids=stop_token_ids,
            note=note,
            queue=queue,
        )

    async def listen(self, port: int, key: str) -> int:
        """Listen on this port, or on a free one if it is 0. Returns the port. Raises `UserError` if it is in use."""
        self.key = key
        server = LimitedServer(self._answer, allowed_connections(self._connections))
        runner = web.ServerRunner(server, shutdown_timeout=CLOSE_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._bind, port).start()
        except OSError as error:
            await runner.cleanup()
            raise UserError(f"[gateway] port: cannot listen on {self._bind}:{port}: {error.strerror}") from error
        self._runner = runner
        self._sweep = asyncio.create_task(server.sweep(), name="close idle connections")
        port = runner.addresses[0][1]
        self.base_url = base_url(self._bind, port)
        return int(port)

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
        session = await self.sessions.take(body.wait)
        if session is None:
            raise ApiError(503, f"no session was open within {body.wait:g} s: ask again", code="no_session")
        prompt = session.prompt
        return _json(
            {
                "id": session.id,
                "api_key": session.key,
                "base_url": self.base_url,
                "model": self._model,
                "timeout": session.seconds,
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
        known = key.isascii() and bool(self.key) and hmac.compare_digest(key, self.key)
        session = self.sessions.with_key(key)
        if not known and session is None:
            raise ApiError(401, "the API key is not that of this run", code="invalid_api_key")
        if session is not None and named and named != session.id:
            raise ApiError(400, f"the API key and {SESSION_HEADER} name two sessions")
        return self.sessions.get(named) if known and named else session


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"

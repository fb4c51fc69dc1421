"""This module answers requests: it samples tokens, records them in the session's conversation, and passes text on.

A session is sampled as its run says, never as its client says, because the loss knows only one distribution. If a
client asks for another distribution, the run's output says so once. A turn is recorded as soon as the client could have
read it: a streamed one even if it breaks off, others when they are complete.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count

import msgspec
import numpy as np

from headrace.engines.base import Delta, Request, Sampling, closing_deltas
from headrace.errors import HeadraceError, ModelError
from headrace.gateway.base import ApiError, Chat, TokenSource
from headrace.gateway.openai_format import Answered, ChatRequest, CompletionRequest, StreamedAnswer, TextRequest
from headrace.gateway.session import Conversation, Opening, Session
from headrace.rollouts.base import derive_seed
from headrace.types import NO_VERSION

Say = Callable[[int, str, StreamedAnswer], Awaitable[None]] | None
"""A callback that gets a choice's number, its next piece of text, and the whole answer so far. None streams nothing."""

END_SECONDS = 10.0
"""Seconds for telling the engines that nobody waits for an answer any more."""
SHORT = 4096
"""Texts of at most this many characters are encoded at once, longer ones in a thread."""
ENCODERS = 2
"""The number of threads that encode long texts. Encoding takes about 200 bytes of memory for each character."""
FRUITLESS_RESUMES = 100
"""After this many aborts in a row without a token between them, the turn fails."""


@dataclass(kw_only=True)
class Completions:
    """Answers requests with the help of the engines."""

    engine: TokenSource
    whole: TokenSource
    """Answers requests of which nobody reads a part before the end."""
    chat: Chat
    max_length: int
    max_tokens: int
    """The limit of a request without a session that names no limit."""
    vocabulary: int
    """The number of token ids that the model has."""
    stop_token_ids: tuple[int, ...]
    note: Callable[[str], None]
    queue: int
    """The most answers that are sampled or wait at the same time."""
    _noted: set[str] = field(default_factory=set, init=False)
    _answering: int = field(default=0, init=False)
    _encoders: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(ENCODERS, "encode"), init=False, repr=False
    )

    async def answer(
        self, want: ChatRequest | TextRequest, session: Session | None, say: Say | None = None
    ) -> Answered:
        """Sample all choices. Raises `ApiError`."""
        if self._answering + want.choices > self.queue:
            raise ApiError(429, f"{self._answering} answers are under way: ask again", code="busy", retry_after=1)
        self._answering += want.choices
        try:
            if session is None:
                return await self._answer(want, None, say)
            async with session.request():
                return await self._answer(want, session, say)
        except TimeoutError:
            raise ApiError(408, "the session's time is over", code="session_timeout") from None
        finally:
            self._answering -= want.choices

    def close(self) -> None:
        """End the threads that encode. Idempotent."""
        self._encoders.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, want: ChatRequest | TextRequest, session: Session | None, say: Say) -> Answered:
        max_tokens = want.max_tokens or self.max_tokens
        if session is not None:
            if session.over:
                raise ApiError(410, f"session {session.id} has ended", code="session_ended")
            self._say_what_is_overruled(want, session)
            share = session.check_budget(want.choices)
            max_tokens = min(share, want.max_tokens or share)
        opening = await self._open(want, session)
        requests = self._requests(want, opening, session, max_tokens)
        tools = isinstance(want, ChatRequest) and want.tools is not None
        choices = [StreamedAnswer(self.chat, want.stops, tools=tools) for _ in requests]
        read = bool(want.stream)
        try:
            await self._draw(self.engine if say is not None or want.stops else self.whole, requests, choices, say)
            read = True
        except ApiError as failure:
            if session is not None:
                session.fail(failure.message)
            raise
        finally:
            if session is not None and read and not session.over:
                self._record(session, opening, choices)
        return Answered(len(opening.token_ids), choices)

    def _requests(
        self, want: CompletionRequest, opening: Opening, session: Session | None, max_tokens: int
    ) -> list[Request]:
        """Return the requests for all choices. Outside of any session they are sampled as the client asks."""
        if session is None:
            name = group = f"gateway-{secrets.token_hex(8)}"
            noise, priority, version = "choice", 0, NO_VERSION
            sampling = Sampling(
                max_tokens=max_tokens,
                temperature=1.0 if want.temperature is None else want.temperature,
                top_p=want.top_p or 1.0,
                top_k=want.top_k or 0,
                min_p=want.min_p or 0.0,
                seed=secrets.randbits(62) if want.seed is None else want.seed,
                stop_token_ids=tuple(dict.fromkeys((*self.chat.stop_token_ids, *self.stop_token_ids))),
            )
        else:
            name, noise = f"{session.id}/{session.requests}", f"request {session.requests}"
            group, priority, version = session.group or session.id, session.priority, session.version
            sampling = msgspec.structs.replace(session.sampling, max_tokens=max_tokens)
            session.requests += 1
        # The noise is a function of (seed, position), so two answers to one history must not have the same seed.
        return [
            Request(
                id=f"{name}/{choice}",
                token_ids=opening.token_ids,
                sampling=msgspec.structs.replace(sampling, seed=derive_seed(sampling.seed, noise, choice)),
                group=group,
                priority=priority,
                version=version,
            )
            for choice in range(want.choices)
        ]

    def _record(self, session: Session, opening: Opening, choices: list[StreamedAnswer]) -> None:
        session.record(opening, choices)
        if session.budget <= 0 and any(answer.finish == "length" for answer in choices):
            session.exhaust()

    async def _draw(
        self, engine: TokenSource, requests: list[Request], choices: list[StreamedAnswer], say: Say
    ) -> None:
        """Sample all choices at the same time. If one fails, the others are cancelled and the request fails."""
        tasks = [
            asyncio.create_task(self._choice(engine, request, number, streamed, say), name=request.id)
            for number, (request, streamed) in enumerate(zip(requests, choices, strict=True))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=END_SECONDS)

    async def _choice(
        self, engine: TokenSource, request: Request, number: int, streamed: StreamedAnswer, say: Say
    ) -> None:
        async with aclosing(sample(engine, request)) as deltas:
            async for delta in deltas:
                piece = streamed.hear(delta)
                if say is not None and (piece or streamed.finish is not None):
                    await say(number, piece, streamed)
                if streamed.finish is not None:
                    return

    async def _open(self, want: ChatRequest | TextRequest, session: Session | None) -> Opening:
        conversation = Conversation(self.chat) if session is None else session.conversation
        if want.characters > self.max_length * self.chat.longest_token:
            raise self._too_long(f"{want.characters} characters", session)
        if want.characters <= SHORT:
            opening = self._encoded(want, conversation)
        else:
            loop = asyncio.get_running_loop()
            opening = await loop.run_in_executor(self._encoders, self._encoded, want, conversation)
        if len(opening.token_ids) >= self.max_length:
            raise self._too_long(f"{len(opening.token_ids)} tokens", session)
        return opening

    def _encoded(self, want: ChatRequest | TextRequest, conversation: Conversation) -> Opening:
        try:
            if isinstance(want, ChatRequest):
                return conversation.open_chat(want.messages, want.tools)
            if isinstance(want.prompt, str):
                return conversation.open_text(want.prompt)
        except ModelError as error:
            raise ApiError(400, str(error), param="messages") from error
        except RecursionError as error:
            raise ApiError(400, "messages: they are nested too deeply", param="messages") from error
        if max(want.prompt) >= self.vocabulary:
            raise ApiError(400, f"prompt: the model has {self.vocabulary} token ids", param="prompt")
        return conversation.open_tokens(want.prompt)

    def _too_long(self, what: str, session: Session | None) -> ApiError:
        if session is not None:
            session.exhaust()
        said = f"{what} leave no room under the longest length of {self.max_length} ([engine] max_length)"
        return ApiError(400, said, code="context_length_exceeded")

    def _say_what_is_overruled(self, want: CompletionRequest, session: Session) -> None:
        for name in ("temperature", "top_p", "top_k", "min_p"):
            wanted, given = getattr(want, name), getattr(session.sampling, name)
            if wanted is not None and wanted != given and name not in self._noted:
                self._noted.add(name)
                self.note(f"an agent asks for {name} {wanted:g}; sessions are sampled as the run says, at {given:g}")
        if want.seed is not None and "seed" not in self._noted:
            self._noted.add("seed")
            self.note("an agent gives a seed; the noise of a session follows from [run] seed")


async def sample(engine: TokenSource, request: Request) -> AsyncGenerator[Delta]:
    """Yield the deltas of a turn, sampled with as many requests as it needs. Raises `ApiError`.

    An aborted request is resumed from its prefix. The last delta has `finish` "stop" or "length".
    """
    limit = request.sampling.max_tokens
    token_ids = request.token_ids
    sampled = fruitless = 0
    for attempt in count():
        before, aborted = sampled, False
        asked = msgspec.structs.replace(
            request,
            id=f"{request.id}/{attempt}",
            token_ids=token_ids,
            sampling=msgspec.structs.replace(request.sampling, max_tokens=limit - sampled),
        )
        try:
            # Closing this iterator early also closes the engine's iterator, which aborts the request in the engine.
            async with closing_deltas(engine.generate(asked)) as deltas:
                async for delta in deltas:
                    if delta.finish == "failed":
                        raise _failure(f"{engine.name}: {delta.error or 'failed without a reason'}")
                    sampled += len(delta.token_ids)
                    token_ids = np.concatenate([token_ids, np.asarray(delta.token_ids, np.int32)])
                    aborted = delta.finish == "aborted"
                    if aborted:
                        delta = msgspec.structs.replace(delta, finish="length" if sampled == limit else None)
                    yield delta
                    if delta.finish is not None:
                        return
                    if aborted:
                        break
        except HeadraceError as error:
            raise _failure(f"{engine.name}: {error}") from error
        if not aborted:
            raise _failure(f"{engine.name}: the stream ended without a finish")
        fruitless = fruitless + 1 if sampled == before else 0
        if fruitless > FRUITLESS_RESUMES:
            raise _failure(f"{engine.name} aborted {fruitless} times in a row without a token")


def _failure(reason: str) -> ApiError:
    return ApiError(503, reason, code="engine_failure")

"""Where the replies of a judge come from: an engine of ours with a model of its own, or a server behind a URL."""

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from headrace.engines.base import Request, Sampling, closing_deltas
from headrace.engines.serving import RemoteEngine
from headrace.errors import ChannelError, HeadraceError, one_line
from headrace.scoring.asking import NoUseToRetry
from headrace.scoring.base import ScoreError
from headrace.scoring.model_process import ModelEngine
from headrace.scoring.server import SHOWN, Server
from headrace.types import Int32Array

Messages = Sequence[Mapping[str, str]]


class Chat(Protocol):
    """The chat format of the judge's model."""

    stop_token_ids: tuple[int, ...]

    def open(self, messages: Messages) -> Int32Array:
        """Return the tokens of these messages, up to where the reply begins."""

    def decode(self, token_ids: Int32Array) -> str:
        """Return the text of these tokens."""


class Replies(Protocol):
    """A source of replies."""

    async def start(self) -> None:
        """Prepare the source. Raises `ConfigError` if it cannot be used."""

    async def sample(self, messages: Messages, count: int, seed: int) -> list[str]:
        """Return `count` replies to these messages. Raises `ScoreError`."""

    async def close(self) -> None:
        """Release what the source holds. Idempotent."""


class EngineReplies:
    """Replies from an engine of ours, in the process of the scorer's model."""

    def __init__(self, process: ModelEngine, chat: Chat, *, max_tokens: int, temperature: float) -> None:
        self.process = process
        self._chat = chat
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._ids = itertools.count()

    async def start(self) -> None:
        """See `Replies.start`."""

    async def close(self) -> None:
        """See `Replies.close`. The process belongs to its launcher."""

    async def sample(self, messages: Messages, count: int, seed: int) -> list[str]:
        """See `Replies.sample`. Replies to the same messages share the computation of their prompt."""
        engine = await self.process.engine()
        asked, timeout = time.monotonic(), self.process.timeout
        try:
            async with asyncio.timeout(timeout):
                return await self._sample(engine, messages, count, seed)
        except TimeoutError:
            self.process.late(asked)
            raise ScoreError(f"{self.process.name} took more than {timeout:g} s") from None

    async def _sample(self, engine: RemoteEngine, messages: Messages, count: int, seed: int) -> list[str]:
        try:
            tokens = self._chat.open(messages)
        except HeadraceError as error:
            raise NoUseToRetry(one_line(str(error))) from error
        group = f"{self.process.name}/{next(self._ids)}"
        requests = [
            Request(
                id=f"{group}/{number}",
                token_ids=tokens,
                group=group,
                sampling=Sampling(
                    max_tokens=self._max_tokens,
                    temperature=self._temperature,
                    seed=seed + number,
                    stop_token_ids=self._chat.stop_token_ids,
                ),
            )
            for number in range(count)
        ]
        async with asyncio.TaskGroup() as tasks:
            replies = [tasks.create_task(self._reply(engine, request), name=request.id) for request in requests]
        found = [reply.result() for reply in replies]
        for each in found:
            if isinstance(each, ScoreError):
                raise each
        return [each for each in found if isinstance(each, str)]

    async def _reply(self, engine: RemoteEngine, request: Request) -> str | ScoreError:
        """Return one reply, or why there is none."""
        tokens: list[int] = []
        try:
            async with closing_deltas(engine.generate(request)) as deltas:
                async for delta in deltas:
                    tokens += delta.token_ids.tolist()
                    if delta.finish in ("failed", "aborted"):
                        return ScoreError(one_line(delta.error) or f"{engine.name} ended the reply")
        except ChannelError as error:
            return ScoreError(one_line(str(error)))
        return self._chat.decode(np.asarray(tokens, np.int32))


class UrlReplies:
    """Replies from an OpenAI-compatible server."""

    def __init__(
        self, url: str, model: str, *, key: str, max_tokens: int, temperature: float, concurrency: int
    ) -> None:
        """`key` is the API key; empty if the server needs none."""
        self._server = Server(f"{url.rstrip('/')}/chat/completions", key=key, concurrency=concurrency)
        self._settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature}

    async def start(self) -> None:
        """See `Replies.start`."""
        await self._server.start()

    async def close(self) -> None:
        """See `Replies.close`."""
        await self._server.close()

    async def sample(self, messages: Messages, count: int, seed: int) -> list[str]:
        """See `Replies.sample`. If the server returns too few replies, each missing one is asked for by itself."""
        replies = (await self._ask(messages, count, seed))[:count]
        others = [self._ask(messages, 1, seed + number) for number in range(len(replies), count)]
        for found in await asyncio.gather(*others, return_exceptions=True):
            if isinstance(found, BaseException):
                raise found
            replies += found[:1]
        return replies

    async def _ask(self, messages: Messages, count: int, seed: int) -> list[str]:
        url = self._server.url
        body: dict[str, Any] = {**self._settings, "messages": list(messages), "seed": seed}
        if count > 1:
            body["n"] = count
        text = await self._server.post(body)
        try:
            choices = msgspec.json.decode(text, type=_Completion).choices
        except msgspec.MsgspecError as error:
            raise ScoreError(f"{url} did not answer as OpenAI's API does: {one_line(str(error), SHOWN)}") from error
        if not choices:
            raise ScoreError(f"{url} answered without a reply")
        return [choice.message.content or "" for choice in choices]


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    """The part of a chat completion that a judge reads."""

    choices: list[_Choice]

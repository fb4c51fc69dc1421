"""A chat format whose text does not tell its tokens, and a gateway over a fake engine.

`serving` is the part of the gateway that has a process of its own, `relayed` both parts.
"""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.engines.base import Engine, Sampling
from headrace.engines.fake import FakeEngine
from headrace.gateway.gateway import Gateway
from headrace.gateway.relay import Relay
from headrace.gateway.session import Session, new_key
from headrace.tasks.chat import ChatFormat, ChatTemplate
from headrace.types import Prompt
from inner_gateway import both_sides

SPECIAL = ["<|user|>", "<|assistant|>", "<|end|>", "<|tool|>"]
USER, ASSISTANT, END, TOOL = range(4)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = [a + b for a in "abcdef" for b in "abcde"]
"""Pairs that the tokenizer merges: two sampled letters come back from text as one token."""
TEMPLATE = (
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def merging_chat(template: str = TEMPLATE) -> ChatFormat:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS, "?", " ", *PAIRS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in PAIRS], unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    return ChatFormat(tokenizer, ChatTemplate(template, {}, "test"), [END])


def fake_engine(**arguments: Any) -> FakeEngine:
    return FakeEngine(version=3, **{"lengths": [5, 7, 4], **arguments})


@asynccontextmanager
async def serving(
    engine: Engine | None = None,
    *,
    max_tokens: int = 40,
    max_length: int = 200,
    template: str = TEMPLATE,
    **more: Any,
) -> AsyncIterator[Gateway]:
    gateway = Gateway(
        engine or fake_engine(),
        merging_chat(template),
        model="tiny",
        max_length=max_length,
        max_tokens=max_tokens,
        **more,
    )
    await gateway.listen(0, new_key())
    try:
        yield gateway
    finally:
        await gateway.close()


@asynccontextmanager
async def relayed(engine: Engine | None = None, **more: Any) -> AsyncIterator[Relay]:
    async with both_sides(engine or fake_engine(), merging_chat(), **more) as relay:
        yield relay


def opened(gateway: Gateway, *, seed: int = 1, max_tokens: int = 40, temperature: float = 1.0) -> Session:
    """A session that somebody works in."""
    session = Session(
        chat=gateway.chat,
        prompt=Prompt(id="p", messages=[{"role": "user", "content": "hi"}], data={"answer": "b"}),
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=(END,)),
        max_turns=8,
        seconds=20.0,
    )
    gateway.sessions.add(session)
    session.begin()
    return session


def client(gateway: Gateway, session: Session | None = None, **more: Any) -> AsyncOpenAI:
    key = gateway.key if session is None else session.key
    return AsyncOpenAI(base_url=gateway.base_url, api_key=key, max_retries=0, timeout=20.0, **more)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def post(gateway: Gateway | Relay, path: str, body: Any, key: str | None = None) -> tuple[int, Any]:
    """A plain request, without the client's own checks."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {gateway.key if key is None else key}", "content-type": "application/json"}
    request = urllib.request.Request(gateway.base_url + path, data, headers)

    def send() -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return await asyncio.to_thread(send)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if holds():
                return
            await asyncio.sleep(0.02)

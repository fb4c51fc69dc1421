"""Parts that the rollout tests share: a chat format small enough to check by hand, and scripted environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headrace.engines.base import Engine, Sampling
from headrace.engines.fake import FakeEngine
from headrace.rollouts.base import EpisodePlan
from headrace.rollouts.turns import Episode
from headrace.scoring.base import Stage
from headrace.tasks.base import EnvironmentStep
from headrace.types import Int32Array, Prompt

OPEN, USER, ASSISTANT, END = 60, 61, 62, 63
"""Ids over 59 are markers; a character is its code modulo 59."""


class TinyChat:
    """`<user>text<end><assistant>` ..., one token a character. It counts what it renders."""

    stop_token_ids = (END,)
    end_token_id = END

    def __init__(self) -> None:
        self.opened = 0
        self.decoded: list[list[int]] = []

    def open(self, messages: Sequence[Mapping[str, str]]) -> Int32Array:
        self.opened += 1
        return np.concatenate([np.array([OPEN], np.int32), self._render(messages)])

    def continue_(self, messages: Sequence[Mapping[str, str]], *, ended: bool) -> Int32Array:
        return np.concatenate([np.array([] if ended else [END], np.int32), self._render(messages)])

    def open_text(self, text: str) -> Int32Array:
        return self.encode(text)

    def encode(self, text: str) -> Int32Array:
        return np.array([ord(c) % 59 for c in text], np.int32)

    def decode(self, token_ids: Int32Array) -> str:
        self.decoded.append(token_ids.tolist())
        return "".join(f"<{t}>" for t in token_ids)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> Int32Array:
        parts = [np.array([USER, *self.encode(m["content"]), END], np.int32) for m in messages]
        return np.concatenate([*parts, np.array([ASSISTANT], np.int32)])


class Script:
    """An environment that answers from a list: a step, an exception to raise, or seconds to hang."""

    def __init__(self, *answers: EnvironmentStep | Exception | float, opening: str | Exception | float = "hi") -> None:
        self.answers = list(answers)
        self.opening = opening
        self.heard: list[str] = []
        self.closed = 0

    async def reset(self) -> list[dict[str, str]]:
        if isinstance(self.opening, Exception):
            raise self.opening
        if isinstance(self.opening, float):
            await asyncio.sleep(self.opening)
        return [{"role": "user", "content": self.opening}] if isinstance(self.opening, str) and self.opening else []

    async def step(self, completion: str) -> EnvironmentStep:
        self.heard.append(completion)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            return done(1.0)
        return answer

    async def close(self) -> None:
        self.closed += 1


def done(reward: float | None = 1.0, **metrics: float) -> EnvironmentStep:
    return EnvironmentStep(done=True, reward=reward, metrics=metrics)


def says(text: str, **metrics: float) -> EnvironmentStep:
    return EnvironmentStep(messages=[{"role": "tool", "content": text}], metrics=metrics)


def episode(
    environment: Script,
    engine: Engine | None = None,
    *,
    index: int = 0,
    id: str | None = None,
    chat: TinyChat | None = None,
    prompt: Prompt | None = None,
    max_tokens: int = 200,
    max_turns: int = 4,
    max_length: int | None = None,
    seed: int = 5,
    stop: tuple[int, ...] = (),
    scoring: Stage | None = None,
) -> Episode:
    plan = EpisodePlan(
        id=id or f"9/{index}",
        index=index,
        prompt=prompt or Prompt(id="p", messages=[{"role": "user", "content": "hi"}]),
        sampling=Sampling(max_tokens=max_tokens, seed=seed, stop_token_ids=stop),
        max_turns=max_turns,
        max_length=max_length,
    )
    engine = engine or FakeEngine(version=1, lengths=[6, 4, 8])
    return Episode(plan, environment, engine, chat or TinyChat(), scoring)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if holds():
                return
            await asyncio.sleep(0)

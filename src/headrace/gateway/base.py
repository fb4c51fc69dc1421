"""What the parts of the gateway share: its errors, its chat format, and what an agent's session comes to.

    agent ──HTTP──▶ server ──▶ wants ──▶ completions ──▶ engines
                      │                      │
                      └──── session ◀── conversation (tokens, log-probabilities, versions)
                               │
                    episode ◀──┴── reward: one session is one rollout

An error of a client is an `ApiError` and reaches it as OpenAI's JSON; nothing that a client sends ends a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.rollouts.base import AnyEpisode, EpisodePlan
from headrace.scoring.base import Scoring
from headrace.types import Int32Array

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class ApiError(Exception):
    """A request that is answered with an error, in OpenAI's shape."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """What `openai.APIStatusError` reads."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Chat(Protocol):
    """A `rollouts.ChatFormat` that knows tools."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens with which the model ends its turn."""
        ...

    def open(self, messages: Sequence[Mapping[str, Any]], *, tools: Tools = None) -> Int32Array:
        """The tokens of the opening messages, up to where the policy's first turn begins."""
        ...

    def continue_(self, messages: Sequence[Mapping[str, Any]], *, ended: bool, tools: Tools = None) -> Int32Array:
        """The tokens to append after the policy's turn, up to where its next turn begins."""
        ...

    def encode(self, text: str) -> Int32Array:
        """The tokens of a text, as it is."""
        ...

    def decode(self, token_ids: Sequence[int] | Int32Array) -> str:
        """The text of these tokens."""
        ...


class EpisodeMaker(Protocol):
    """What the episodes of a run need of its gateway."""

    def episode(self, plan: EpisodePlan, scoring: Scoring | None = None) -> AnyEpisode:
        """A rollout in the making whose turns an agent takes; `scoring` is told of its tokens."""
        ...


class AgentServer(Protocol):
    """What the start and the end of a run need of its gateway."""

    async def start(self) -> None:
        """Listen, and say where. Raises `UserError` if that is not possible."""
        ...

    async def close(self) -> None:
        """End every session and stop listening. Idempotent."""
        ...


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says its session was worth."""

    reward: float
    metrics: dict[str, float] = {}

    def problem(self) -> str:
        """Why this cannot be a reward, or nothing."""
        if not math.isfinite(self.reward):
            return f"the reward is {self.reward}, not a finite number"
        odd = [name for name, value in self.metrics.items() if not math.isfinite(value)]
        return f"the metric {odd[0]!r} is not a finite number" if odd else ""

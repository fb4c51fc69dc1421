"""What the parts of the gateway share: errors, the chat format, and the result of an agent's session.

    agent ──HTTP──▶ gateway ──▶ openai_format ──▶ completions ──▶ serving ═══▶ relay ──▶ engines
                      │                              │                          │
                      └──── session ◀── conversation (tokens, ...)              └──▶ episode: one session, one rollout

Everything up to `serving` runs in a process of its own, everything after it in the controller. A client's error is an
`ApiError`, which the client receives as OpenAI's JSON. Nothing that a client sends can end a run.
"""

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.channel.codec import Message as ChannelMessage
from headrace.engines.base import Delta, Request
from headrace.rollouts.base import AnyEpisode, ChatFormat, EpisodePlan
from headrace.scoring.base import Stage
from headrace.types import Int32Array

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
GATEWAY_DIED = "the gateway died"
"""The first words of the reason of a session that was lost because the gateway's process died."""
EpisodeMaker = Callable[[EpisodePlan, Stage], AnyEpisode]
"""A function that makes an episode whose turns an agent takes. The scoring stage gets the episode's tokens."""


class ApiError(Exception):
    """An error with which a request is answered, in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """`retry_after` is the number of seconds after which the client should ask again."""
        super().__init__(message)
        self.retry_after = retry_after
        self.status = status
        self.message = message
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the JSON body that `openai.APIStatusError` reads."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Chat(ChatFormat, Protocol):
    """A chat format that supports tools."""

    def open(self, messages: Sequence[Mapping[str, Any]], *, tools: Tools = None) -> Int32Array:
        """Return the tokens of the opening messages, up to the start of the policy's first turn."""
        ...

    def continue_(self, messages: Sequence[Mapping[str, Any]], *, ended: bool, tools: Tools = None) -> Int32Array:
        """Return the tokens to append after the policy's turn, up to the start of its next turn."""
        ...

    def decode(self, token_ids: Sequence[int] | Int32Array) -> str:
        """Return the text of these tokens."""
        ...

    @property
    def longest_token(self) -> int:
        """The number of characters of the longest token."""
        ...


class TokenSource(Protocol):
    """A source of sampled tokens: the engines, or a connection to them."""

    name: str

    def generate(self, request: Request) -> AsyncIterator[Delta]:
        """See `engines.base.Sampler.generate`."""
        ...


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """The reward that an agent reports for its session."""

    reward: float
    metrics: dict[str, float] = {}

    def problem(self) -> str:
        """Return why this reward is invalid, or an empty text."""
        if not math.isfinite(self.reward):
            return f"the reward is {self.reward}, not a finite number"
        odd = [name for name, value in self.metrics.items() if not math.isfinite(value)]
        return f"the metric {odd[0]!r} is not a finite number" if odd else ""


class GatewayHandle(Protocol):
    """What the controller does with the gateway's process."""

    name: str

    def hear(self, message: ChannelMessage) -> None:
        """Handle a message of the process."""

    def lost(self, reason: str) -> None:
        """Fail the sessions in which agents work, because the process died."""

    async def back(self) -> None:
        """Make the restarted process serve again, at the same address."""


def base_url(host: str, port: int) -> str:
    """Return the base URL for an `openai.OpenAI` client."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"

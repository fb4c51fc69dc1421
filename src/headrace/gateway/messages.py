"""The messages between the controller and the process of the gateway.

Each message carries all items that one side produced in one turn of its event loop, in their order. So one message
holds the tokens of many requests, and the end of a session comes after everything that was recorded in it.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.channel.codec import Message
from headrace.engines.base import Delta, FinishReason, Request, Sampling
from headrace.gateway.base import Reward
from headrace.types import NO_VERSION

# ---- from the controller


class Open(msgspec.Struct, kw_only=True, tag=True):
    """Open a session. The answer is `Opened`."""

    session: str
    key: str
    sampling: Sampling
    max_turns: int
    seconds: float
    """Seconds in which the session must have its reward, from the moment at which an agent starts to work in it."""
    group: str = ""
    priority: int = 0
    version: int = NO_VERSION
    """The only version that may answer; `NO_VERSION` if any version may."""
    offered: bytes = b""
    """The prompt as JSON, if agents from outside may take the session. It is JSON because msgpack integers end at 64
    bits. Otherwise an agent works in the session from now on."""


class Close(msgspec.Struct, kw_only=True, tag=True):
    """Close a session and end its requests. The answer is `Closed`."""

    session: str


class Sampled(msgspec.Struct, kw_only=True, tag=True):
    """New tokens of a request. Arrays are bytes: a frame for each small array would cost more than the array."""

    request_id: str
    token_ids: bytes
    logprobs: bytes
    versions: bytes
    finish: FinishReason | None = None
    error: str = ""

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "Sampled":
        """Join deltas of one request, of which only the last may have a finish."""
        return cls(
            request_id=deltas[-1].id,
            token_ids=b"".join(np.asarray(delta.token_ids, np.int32).tobytes() for delta in deltas),
            logprobs=b"".join(np.asarray(delta.logprobs, np.float32).tobytes() for delta in deltas),
            versions=b"".join(np.asarray(delta.versions, np.int32).tobytes() for delta in deltas),
            finish=deltas[-1].finish,
            error=deltas[-1].error,
        )

    def delta(self) -> Delta:
        """Return the delta."""
        return Delta(
            id=self.request_id,
            token_ids=np.frombuffer(self.token_ids, np.int32),
            logprobs=np.frombuffer(self.logprobs, np.float32),
            versions=np.frombuffer(self.versions, np.int32),
            finish=self.finish,
            error=self.error,
        )


class ToGateway(Message):
    """Items for the gateway, in their order."""

    items: list[Open | Close | Sampled]


class Listen(Message):
    """Listen for clients. The answer is `Listening`."""

    port: int
    key: str


class Listening(Message):
    """The gateway listens on this port."""

    port: int


# ---- from the gateway


class Ask(msgspec.Struct, kw_only=True, tag=True):
    """A request for the engines."""

    request: Request
    whole: bool = False
    """Whether all tokens may come together, when the request has ended."""


class Withdraw(msgspec.Struct, kw_only=True, tag=True):
    """Nobody waits for the answer to this request any more."""

    request_id: str


class Opened(msgspec.Struct, kw_only=True, tag=True):
    """A session is open: requests with its key are answered."""

    session: str


class Closed(msgspec.Struct, kw_only=True, tag=True):
    """A session is closed: nothing more will be recorded in it."""

    session: str


class Taken(msgspec.Struct, kw_only=True, tag=True):
    """An agent from outside has taken a session."""

    session: str


class Recorded(msgspec.Struct, kw_only=True, tag=True):
    """A turn was recorded in a session."""

    session: str
    parent: int
    """The number of the turn that this turn follows; -1 if it follows none."""
    shared: bool
    """Whether this turn answers the same request as the turn before it."""
    context: bytes
    """The new tokens before this turn, as 32-bit integers; empty if the turn shares them with the turn before it."""
    sampled: bytes
    logprobs: bytes
    versions: bytes


class Limited(msgspec.Struct, kw_only=True, tag=True):
    """A session has used up its budget, or the engines failed in it."""

    session: str
    exhausted: bool = False
    failure: str = ""


class Rewarded(msgspec.Struct, kw_only=True, tag=True):
    """A session has its reward."""

    session: str
    reward: Reward


class Said(msgspec.Struct, kw_only=True, tag=True):
    """A line for the people who watch the run."""

    line: str


FromGatewayItem = Ask | Withdraw | Opened | Closed | Taken | Recorded | Limited | Rewarded | Said


class FromGateway(Message):
    """Items for the controller, in their order."""

    items: list[FromGatewayItem]

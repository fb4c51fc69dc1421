"""What the controller and an engine process say to each other."""

from __future__ import annotations

from headrace.channel.codec import Message
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Request
from headrace.types import Float32Array, Int32Array


class Submit(Message):
    """Requests that enter the engine between the same two steps, in this order."""

    requests: list[Request]


class Deltas(Message):
    """New tokens, of any number of requests."""

    deltas: list[Delta]


class Abort(Message):
    """End these requests; all, if None."""

    ids: list[str] | None


class Fork(Message):
    """Continue a running request in several ways; answered by `Forked`."""

    request_id: str
    at: int
    n: int


class Forked(Message):
    """The requests to submit."""

    requests: list[Request]


class Load(Message):
    """Fetch, prove and swap in these weights; answered by `LoadProved`."""

    manifest: Manifest


class LoadProved(Message):
    """The outcome of a `Load`, also where it was rejected."""

    proof: Proof


class ScoreTokens(Message):
    """Score a sequence under the live weights; answered by `TokensScored`."""

    token_ids: Int32Array


class TokensScored(Message):
    """Log-probabilities of tokens 1..n."""

    logprobs: Float32Array

"""The messages between the controller and an engine process."""

from __future__ import annotations

from headrace.channel.codec import Message
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, Request
from headrace.types import Float32Array, Int32Array


class Submit(Message):
    """Requests that enter the engine between the same two steps, in this order."""

    requests: list[Request]


class Deltas(Message):
    """New tokens of any number of requests."""

    deltas: list[Delta]


class Abort(Message):
    """End these requests, or all requests if `ids` is None."""

    ids: list[str] | None


class Fork(Message):
    """Make `n` requests that continue a running request after its first `at` tokens. The answer is `Forked`."""

    request_id: str
    at: int
    n: int


class Forked(Message):
    """The new requests, which the controller may submit."""

    requests: list[Request]


class Load(Message):
    """Fetch, swap in and prove these weights. The answer is `LoadProved`."""

    manifest: Manifest


class LoadProved(Message):
    """The outcome of a `Load`, accepted or rejected."""

    proof: Proof


class ScoreTokens(Message):
    """Score a sequence under the live weights. The answer is `TokensScored`."""

    token_ids: Int32Array


class TokensScored(Message):
    """The log-probabilities of tokens 1..n of a sequence."""

    logprobs: Float32Array

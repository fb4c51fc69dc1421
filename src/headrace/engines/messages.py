"""What the controller and an engine process say to each other."""

from __future__ import annotations

from headrace.channel.codec import Message
from headrace.delivery.base import Manifest, Proof
from headrace.engines.base import Delta, EngineStats, Request
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


class Pause(Message):
    """Stop stepping; answered by `Done` when no step is under way."""


class Resume(Message):
    """Step again; answered by `Done`."""


class Done(Message):
    """What was asked has happened."""


class Load(Message):
    """Fetch, prove and swap in these weights; answered by `Proved`."""

    manifest: Manifest


class Proved(Message):
    """The outcome of a `Load`, also where it was rejected."""

    proof: Proof


class Score(Message):
    """Score a sequence under the live weights; answered by `Scored`."""

    token_ids: Int32Array


class Scored(Message):
    """Log-probabilities of tokens 1..n."""

    logprobs: Float32Array


class AskStats(Message):
    """Answered by `Stats`."""


class Stats(Message):
    """Where the engine stands."""

    stats: EngineStats

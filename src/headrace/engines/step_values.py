"""The messages between a process-reward scorer and the process of its model."""

import msgspec

from headrace.channel.codec import Message
from headrace.types import Int32Array


class StepTokens(msgspec.Struct, kw_only=True):
    """Tokens by which a rollout has grown, for a process-reward model."""

    rollout: str
    start: int
    """The number of tokens before these. With 0, the process forgets what it knows of the rollout."""
    token_ids: Int32Array
    wanted: list[int]
    """The positions among these tokens at which values are wanted, ascending."""


class StepAnswer(msgspec.Struct, kw_only=True):
    """The answer to one `StepTokens`."""

    values: list[float] = []
    """The probability of a good step at each wanted position."""
    missing: bool = False
    """Whether the process does not know the tokens before these, because it was restarted or has forgotten them."""
    error: str = ""
    """Why there are no values, in one line."""


class ReadSteps(Message):
    """New tokens of any number of rollouts. The process answers with `StepsRead`."""

    growths: list[StepTokens]


class StepsRead(Message):
    """The answers to a `ReadSteps`, in its order."""

    answers: list[StepAnswer]
    version: str
    """The digest of the weights of the model that gave the values."""
    time: float
    """When the values were known, in seconds of the monotonic clock of the process."""


class ForgetSteps(Message):
    """These rollouts have ended, and their keys and values are freed. There is no answer."""

    rollouts: list[str]

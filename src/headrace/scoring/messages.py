"""What a reward worker and its owner say to each other, beside the `Question`."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.scoring.base import Judgement


class RewardSetup(msgspec.Struct, kw_only=True):
    """The first frame to a worker: which function it serves."""

    reference: str
    arguments: dict[str, Any] | None = None
    """If given, the reference names a maker: called once with these, it returns the reward function."""


class ScoreReply(msgspec.Struct, kw_only=True):
    """The answer to one `Question`: a judgement, or why there is none."""

    judgement: Judgement | None = None
    error: str = ""

"""The messages between a reward worker and its owner, in addition to `Question`."""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.scoring.base import Judgement


class RewardSetup(msgspec.Struct, kw_only=True):
    """The first frame to a worker: the function that it serves."""

    reference: str
    arguments: dict[str, Any] | None = None
    """The arguments of a factory. If they are given, the reference names a factory, which is called once with them and
    returns the reward function."""


class ScoreReply(msgspec.Struct, kw_only=True):
    """The answer to one `Question`: a judgement, or the reason why there is none."""

    judgement: Judgement | None = None
    error: str = ""

"""The outcome of a group, as one line of the metrics. A version that was published again makes no group older."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.types import Group, without_republished


def describe_end(group: Group, outcome: str, version: int, republished: Sequence[int] = ()) -> dict[str, Any]:
    """Describe how a group ended: the length of its answers, the difficulty of its prompt, its age when it ended."""
    usable = group.usable
    rewards = [rollout.reward for rollout in usable if rollout.reward is not None]
    oldest = [trace.oldest_version for rollout in usable for trace in rollout.traces if trace.trained.any()]

    def behind(older: int) -> int:
        return int(without_republished(version, republished) - without_republished(older, republished))

    return {
        "group": group.id,
        "outcome": outcome,
        "tokens": float(np.mean([rollout.sampled_tokens for rollout in usable])) if usable else None,
        "longest": max((rollout.sampled_tokens for rollout in usable), default=None),
        "reward": float(np.mean(rewards)) if rewards else None,
        "age": behind(group.version),
        "lag": behind(min(oldest)) if oldest else None,
    }

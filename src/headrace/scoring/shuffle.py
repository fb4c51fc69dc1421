"""A control experiment: rewards that say nothing about the answers that get them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from headrace.types import Group


def shuffle_rewards(groups: Sequence[Group], seed: int, step: int) -> list[Group]:
    """Return the same groups, with the rewards of all rollouts permuted at random over the whole batch."""
    rewards = np.array([rollout.reward for group in groups for rollout in group.usable], np.float64)
    shuffled = iter(np.random.default_rng([seed, step]).permutation(rewards).tolist())
    return [
        msgspec.structs.replace(
            group,
            rollouts=[
                rollout if rollout.ending == "failed" else msgspec.structs.replace(rollout, reward=next(shuffled))
                for rollout in group.rollouts
            ],
        )
        for group in groups
    ]

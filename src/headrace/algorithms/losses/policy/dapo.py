"""DAPO's loss: clipped GRPO with more room above than below, so that unlikely tokens can become likely.

The rest of DAPO is configuration, not loss: the mean over the step's tokens, and the shaping of overlong answers.
"""

from functools import partial

from headrace.algorithms.losses.base import Loss, clip_range
from headrace.algorithms.losses.policy.grpo import clipped_grpo
from headrace.config.schema import AlgorithmConfig

READS = ("clip_low", "clip_high")
CAPS_WEIGHTS = True
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def build(config: AlgorithmConfig) -> Loss:
    """Build clipped GRPO with DAPO's clipping, unless the configuration sets its own."""
    low, high = clip_range(config, CLIP_LOW, CLIP_HIGH)
    return partial(clipped_grpo, clip_low=low, clip_high=high)

"""On-policy distillation: a teacher judges the policy's own tokens one by one. Rewards are not used.

With `teacher_divergence = "sampled"`, the advantage of a token is log teacher - log pi, so the expected on-policy
gradient is that of KL(pi || teacher). With "forward" or "reverse", the loss of a token is the divergence itself at the
token's position, over the teacher's likeliest tokens and their tail (see `losses.teacher`).
"""

from functools import partial
from typing import Literal

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, given, log_ratio, ratio_sums
from headrace.algorithms.losses.policy.cispo import CLIP_HIGH, cispo
from headrace.algorithms.losses.teacher import top_divergence
from headrace.config.schema import AlgorithmConfig

READS = ("clip_high", "teacher_divergence")
NEEDS = ("teacher",)
USES_REWARDS = False
CAPS_WEIGHTS = True


def distillation(inputs: TokenInputs, *, clip_high: float = CLIP_HIGH) -> TokenLoss:
    """Return -sg(min(r, 1 + clip_high) * log(teacher / pi)) * log pi, with r = pi / mu."""
    gap = log_ratio(given(inputs.teacher), inputs.logprobs.detach())
    result = cispo(inputs._replace(advantages=gap), clip_high=clip_high)
    return result._replace(sums=result.sums | {"teacher_kl": -gap.sum()})


def distillation_of_top(inputs: TokenInputs, *, direction: Literal["forward", "reverse"]) -> TokenLoss:
    """Return the divergence from the teacher at each token's position, over likeliest tokens and tail."""
    values = top_divergence(given(inputs.top), direction)
    sums = ratio_sums(log_ratio(inputs.logprobs, inputs.behaviour))
    return TokenLoss(values, sums | {"teacher_kl": values.detach().sum()})


def build(config: AlgorithmConfig) -> Loss:
    """Build distillation with the configuration's `teacher_divergence` and `clip_high`."""
    if config.teacher_divergence == "sampled":
        return partial(distillation, clip_high=CLIP_HIGH if config.clip_high is None else config.clip_high)
    return partial(distillation_of_top, direction=config.teacher_divergence)

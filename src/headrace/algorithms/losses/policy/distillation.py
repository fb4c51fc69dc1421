"""On-policy distillation: a teacher judges the policy's own tokens one by one.

The advantage of a token is log teacher - log pi, so the expected on-policy gradient is that of KL(pi || teacher).
Rewards are not used.
"""

from functools import partial

from headrace.algorithms.losses.base import Loss, TokenInputs, TokenLoss, given, log_ratio
from headrace.algorithms.losses.policy.cispo import CLIP_HIGH, cispo
from headrace.config.schema import AlgorithmConfig

READS = ("clip_high",)
NEEDS = ("teacher",)
USES_REWARDS = False
CAPS_WEIGHTS = True


def distillation(inputs: TokenInputs, *, clip_high: float = CLIP_HIGH) -> TokenLoss:
    """Return -sg(min(r, 1 + clip_high) * log(teacher / pi)) * log pi, with r = pi / mu."""
    gap = log_ratio(given(inputs.teacher), inputs.logprobs.detach())
    result = cispo(inputs._replace(advantages=gap), clip_high=clip_high)
    return result._replace(sums=result.sums | {"teacher_kl": -gap.sum()})


def build(config: AlgorithmConfig) -> Loss:
    """Build distillation with the configuration's `clip_high`."""
    return partial(distillation, clip_high=CLIP_HIGH if config.clip_high is None else config.clip_high)

"""The section [algorithm] of the configuration: how rewards become a loss. It imports no torch."""

import pkgutil
from pathlib import Path
from typing import Annotated, Literal

from headrace.config.base import Fraction, Names, NonNegative, NonNegativeFloat, Positive, PositiveFloat
from headrace.config.teachers import TeacherKeys

POLICY_LOSSES = Path(__file__).parents[1] / "algorithms" / "losses" / "policy"
"""The folder of the built-in losses. Its modules are listed, not imported, because they need torch."""

MOST_ENTROPY_WEIGHT = 1.0
"""The largest weight of an entropy bonus that follows a target. A target that cannot be reached would make it grow for
ever."""

LOSSES = Names(module.name for module in pkgutil.iter_modules([str(POLICY_LOSSES)]))


class AlgorithmConfig(TeacherKeys, frozen=True):
    """[algorithm]: how rewards become a loss."""

    advantage: Annotated[str, Names(("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus"))] = "grpo"
    """How the advantage follows from the reward R. `grpo`: `(R - mean) / std` of the group. `dr_grpo`: `R - mean`.
    `rloo`: `R - mean of the others`. `maxrl`: `(R - mean) / mean`. `reinforce_plus_plus`: `(R - mean) / std` of the
    whole step."""
    credit: Literal["rollout", "turn", "step", "token"] = "rollout"
    """What has an advantage of its own. `rollout`: every token has that of its rollout's reward. Otherwise each turn,
    each scored step, or each token has one, by what the rollout earns from there on: its reward, and the scores of
    turns, steps and tokens that come later (`docs/credit.md`)."""
    discount: Fraction = 1.0
    """What the next turn, step or token earns counts this many times as much as what the present one earns. With
    `critic`, it is the discount of tokens."""
    baseline: Literal["group", "position", "state", "prefix"] = "position"
    """Which turns, steps or tokens of a group are compared with each other. `group`: all. `position`: those with the
    same number in their rollouts. `state`: turns after the same context, such as an equal answer of an environment.
    `prefix`: those before which everything is equal."""
    outcome_weight: NonNegativeFloat | None = None
    """The weight of the advantage of the rollout's reward, which is added to that of each turn, step or token. The
    default depends on the baseline: 1 for `state` and `prefix`, 0 for `group` and `position`."""
    critic: bool = False
    """Estimate advantages by a critic, in place of `advantage`: a value head on the model's last hidden states, and
    generalised advantage estimation (GAE) over tokens. A group may then have one answer (`docs/credit.md`)."""
    gae_lambda: Fraction = 0.95
    """critic: how much an advantage trusts what was earned later more than the values. 1 uses the values only as a
    baseline."""
    critic_learning_rate: PositiveFloat = 1e-3
    """critic: the learning rate of the value head, which is constant."""
    value_weight: NonNegativeFloat = 0.0
    """critic: the weight of the critic's error in the loss of the model's own weights. 0 trains only the value head
    with it."""
    loss: Annotated[str, LOSSES] = "cispo"
    """The policy loss, computed from importance ratios and advantages. `docs/losses.md` has the formulas."""
    clip_low: NonNegativeFloat | None = None
    """The ratio is clipped below at 1 - clip_low. The default depends on the loss: 0.2, and 0.0003 for gspo."""
    clip_high: NonNegativeFloat | None = None
    """The ratio is clipped above at 1 + clip_high. The default depends on the loss: 0.28 for cispo, dapo and
    distillation, 0.2 for grpo and decoupled_ppo, 0.0004 for gspo."""
    sapo_tau_positive: PositiveFloat = 1.0
    """How fast the gate of sapo closes for tokens with a positive advantage."""
    sapo_tau_negative: PositiveFloat = 1.05
    """How fast the gate of sapo closes for tokens without a positive advantage."""
    dppo_delta: NonNegativeFloat = 0.2
    """How far a token's probability may move before dppo_tv excludes the token."""
    proximal: Literal["interpolated", "recomputed"] = "interpolated"
    """The proximal policy of decoupled_ppo. `interpolated`: between the sampler and the policy. `recomputed`: the
    weights with which the version in training began; this needs a copy of them and one more forward pass."""
    proximal_mix: Fraction | None = None
    """The sampler's share in the interpolated proximal policy of decoupled_ppo. By default 1 / lag of the token, and 0
    at lag 0."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """The estimate of the divergence from the reference policy that is added to the loss. It needs one more forward
    pass. The reference is a copy of the weights before the first policy step, after a warm start if there is one. With
    [lora] the reference is the base model without the adapter: it needs no copy, and does not include what a warm start
    has trained."""
    kl_weight: NonNegativeFloat = 1e-3
    """The weight of `kl` in the loss."""
    reward_kl: Literal["none", "k1", "k3"] = "none"
    """The estimate of the divergence from the reference policy that every sampled token pays for in its reward. It is
    that of the sampler, by the recorded log-probabilities. The advantage of a token loses what it and the later tokens
    of its sequence pay. The reference, and what it costs, are those of `kl`."""
    reward_kl_weight: NonNegativeFloat = 1e-3
    """The price of `reward_kl`, in units of the advantage."""
    entropy_weight: NonNegativeFloat | None = None
    """The weight of the entropy bonus at trained tokens. 0 only measures the entropy. By default the entropy is not
    computed."""
    entropy_target: PositiveFloat | None = None
    """The entropy at which the policy is held. `entropy_weight` (by default 0) is then only the weight of the first
    step: after each step it grows by `entropy_rate` times what the entropy of the step lacks, or falls by what it has
    too much. It stays between 0 and 1."""
    entropy_rate: PositiveFloat = 1e-3
    """How fast the weight of the entropy bonus follows `entropy_target`."""
    corrections: list[Literal["tis", "sequence_tis", "icepop", "mis", "opsm"]] = []
    """How tokens on which policy and sampler disagree are treated, with any loss. Several corrections can be
    combined."""
    tis_cap: PositiveFloat = 2.0
    """tis: the largest importance weight of a token in the gradient."""
    sequence_tis_ratio: Literal["product", "mean"] = "product"
    """sequence_tis: how a sequence's weight follows from its tokens' ratios: their `product`, or their geometric
    `mean`."""
    sequence_tis_low: NonNegativeFloat = 0.0
    """sequence_tis: the smallest weight of a sequence."""
    sequence_tis_high: PositiveFloat = 2.0
    """sequence_tis: the largest weight of a sequence."""
    icepop_low: NonNegativeFloat = 0.5
    """icepop: a token with a smaller ratio is left out."""
    icepop_high: PositiveFloat = 5.0
    """icepop: a token with a larger ratio is left out."""
    mis_ratio: Literal["product", "mean"] = "product"
    """mis: how a sequence's ratio follows from its tokens' ratios: their `product`, or their geometric `mean`."""
    mis_low: NonNegativeFloat = 0.0
    """mis: a sequence with a smaller ratio is left out."""
    mis_high: PositiveFloat = 2.0
    """mis: a sequence with a larger ratio is left out."""
    opsm_limit: NonNegativeFloat = 1e-4
    """opsm: if a sequence's mean of log(sampler / policy) is larger, its tokens with negative advantage are left
    out."""
    overlong_buffer: NonNegative = 0
    """The overlong penalty rises over this many tokens before `[rollouts] max_tokens`. 0 switches it off."""
    overlong_penalty: NonNegativeFloat = 1.0
    """The overlong penalty: how much the reward loses at `max_tokens` when `overlong_buffer` is on."""
    length_penalty: NonNegativeFloat = 0.0
    """How much the reward loses at `max_tokens`. Shorter answers lose in proportion to their length."""
    minibatches: Positive = 1
    """The number of minibatches of whole groups into which a batch is divided. Each gets an update of the weights of
    its own. A batch still makes one step."""
    epochs: Positive = 1
    """How often each minibatch of a batch is trained, within the step of the batch."""
    mask_overlong: bool = False
    """Do not train answers that were cut at a limit, of their length or of their turns. Their rewards still count in
    the baseline of their group."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """What the loss is averaged over: the step's tokens, its sequences, or `groups x group_size x max_tokens`."""

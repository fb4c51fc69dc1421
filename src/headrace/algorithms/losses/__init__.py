"""Token losses, one file each. Importing the package registers them all; start reading at `base`."""

from headrace.algorithms.losses import (
    cispo,
    corrections,
    dapo,
    decoupled_ppo,
    distillation,
    dppo_tv,
    entropy,
    grpo,
    gspo,
    imitation,
    kl,
    reinforce,
    sapo,
    topr,
)

__all__ = [
    "cispo",
    "corrections",
    "dapo",
    "decoupled_ppo",
    "distillation",
    "dppo_tv",
    "entropy",
    "grpo",
    "gspo",
    "imitation",
    "kl",
    "reinforce",
    "sapo",
    "topr",
]

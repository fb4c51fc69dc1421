"""Token losses, one file each. Importing the package registers them all; start reading at `base`."""

from headrace.algorithms.losses import (
    cispo,
    corrections,
    dapo,
    decoupled_ppo,
    dppo_tv,
    grpo,
    gspo,
    imitation,
    sapo,
    topr,
)

__all__ = [
    "cispo",
    "corrections",
    "dapo",
    "decoupled_ppo",
    "dppo_tv",
    "grpo",
    "gspo",
    "imitation",
    "sapo",
    "topr",
]

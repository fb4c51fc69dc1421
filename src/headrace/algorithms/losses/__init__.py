"""Token losses. Importing the package imports all losses, corrections and additions. Start reading at `base`."""

from headrace.algorithms.losses import corrections, entropy, imitation, kl, policy

__all__ = ["corrections", "entropy", "imitation", "kl", "policy"]

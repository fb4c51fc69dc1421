"""Token losses. Importing the package brings all of them, and what goes with any; start reading at `base`."""

from headrace.algorithms.losses import corrections, entropy, imitation, kl, policy

__all__ = ["corrections", "entropy", "imitation", "kl", "policy"]

"""Token losses, one file each. Importing the package registers them all; start reading at `base`."""

from headrace.algorithms.losses import cispo, grpo, imitation

__all__ = ["cispo", "grpo", "imitation"]

"""Token losses. Importing the package imports all losses and corrections. Start reading at `base`."""

from headrace.algorithms.losses import corrections, policy

__all__ = ["corrections", "policy"]

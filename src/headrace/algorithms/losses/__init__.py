"""Token losses. Importing the package imports all losses. Start reading at `base`."""

from headrace.algorithms.losses import policy

__all__ = ["policy"]

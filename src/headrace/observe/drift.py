"""This module checks whether trained rollouts look like generated ones: dropping or filtering may favour short ones.

It compares the lengths of the latest rollouts of both kinds by their Kolmogorov-Smirnov distance. A warning needs a
distance that chance does not explain.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

MEMORY = 2048
"""The number of latest rollouts of each kind that are compared."""
FEWEST = 256
"""With fewer rollouts than this of either kind, nothing is reported."""
TOLERANCE = 0.1
CRITICAL = 1.95
"""This factor times sqrt(1/n + 1/m) is a distance that equal distributions exceed once in a thousand times."""

Lengths = npt.NDArray[np.int64]


def ks_distance(first: Lengths, second: Lengths) -> float:
    """Return the largest difference between the two empirical distribution functions."""
    both = np.union1d(first, second)
    cumulative = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (first, second)]
    return float(np.abs(cumulative[0] - cumulative[1]).max())


class LengthDrift:
    """The latest lengths of generated and of trained rollouts."""

    def __init__(self) -> None:
        self.generated: deque[int] = deque(maxlen=MEMORY)
        """The lengths of rollouts that have ended, whether they are trained later or not."""
        self.trained: deque[int] = deque(maxlen=MEMORY)
        self._warned = False

    def distance(self) -> float | None:
        """Return the distance between the two samples; None until both are large enough."""
        if min(len(self.generated), len(self.trained)) < FEWEST:
            return None
        return ks_distance(np.array(self.generated, np.int64), np.array(self.trained, np.int64))

    def warning(self) -> str | None:
        """Return a line when the distance becomes too large; it is repeated only after the distance was small."""
        distance = self.distance()
        if distance is None:
            return None
        chance = CRITICAL * math.sqrt(1 / len(self.generated) + 1 / len(self.trained))
        before, self._warned = self._warned, distance > max(TOLERANCE, chance)
        if before or not self._warned:
            return None
        means = [sum(lengths) / len(lengths) for lengths in (self.trained, self.generated)]
        return (
            f"trained answers are not like the generated ones: mean length {means[0]:.1f} against {means[1]:.1f} "
            f"(Kolmogorov-Smirnov distance {distance:.2f}); something drops or filters by length"
        )

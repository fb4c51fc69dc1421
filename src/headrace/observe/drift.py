"""Do the trained rollouts look like the generated ones? A buffer that drops or filters may keep only what is short.

Lengths of the latest rollouts of both kinds are compared by their Kolmogorov-Smirnov distance; a warning needs one
that chance does not explain.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

MEMORY = 2048
"""Rollouts of each kind."""
FEWEST = 256
"""Before that many were trained nothing is said."""
TOLERANCE = 0.1
CRITICAL = 1.95
"""Times sqrt(1/n + 1/m): a distance that equal distributions exceed once in a thousand times."""

Lengths = npt.NDArray[np.int64]


def ks_distance(first: Lengths, second: Lengths) -> float:
    """The largest difference between the two empirical distribution functions."""
    both = np.union1d(first, second)
    cumulative = [np.searchsorted(np.sort(sample), both, side="right") / len(sample) for sample in (first, second)]
    return float(np.abs(cumulative[0] - cumulative[1]).max())


class LengthDrift:
    """The latest lengths of generated and of trained rollouts."""

    def __init__(self) -> None:
        self._generated: deque[int] = deque(maxlen=MEMORY)
        self._trained: deque[int] = deque(maxlen=MEMORY)
        self._warned = False

    def generated(self, lengths: Iterable[int]) -> None:
        """These rollouts have ended, whatever becomes of them."""
        self._generated.extend(lengths)

    def trained(self, lengths: Iterable[int]) -> None:
        """These were trained."""
        self._trained.extend(lengths)

    def distance(self) -> float | None:
        """Between the two, once there is enough of both."""
        if min(len(self._generated), len(self._trained)) < FEWEST:
            return None
        return ks_distance(np.array(self._generated, np.int64), np.array(self._trained, np.int64))

    def warning(self) -> str | None:
        """A line, once when the distance becomes too large; it is said again only after it was small in between."""
        distance = self.distance()
        if distance is None:
            return None
        chance = CRITICAL * math.sqrt(1 / len(self._generated) + 1 / len(self._trained))
        before, self._warned = self._warned, distance > max(TOLERANCE, chance)
        if before or not self._warned:
            return None
        means = [sum(lengths) / len(lengths) for lengths in (self._trained, self._generated)]
        return (
            f"trained answers are not like the generated ones: mean length {means[0]:.1f} against {means[1]:.1f} "
            f"(Kolmogorov-Smirnov distance {distance:.2f}); something drops or filters by length"
        )

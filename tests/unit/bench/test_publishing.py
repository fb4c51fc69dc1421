"""When a benchmark's publisher publishes."""

from __future__ import annotations

import numpy as np

from headrace.bench.publishing import moment


def test_versions_are_published_at_any_moment_and_the_same_in_every_run() -> None:
    found = [moment(version, 0.02) for version in range(400)]
    assert found == [moment(version, 0.02) for version in range(400)]
    assert np.histogram(found, bins=4, range=(0.0, 0.02))[0].min() > 70
    assert moment(3, 0.0) == 0.0

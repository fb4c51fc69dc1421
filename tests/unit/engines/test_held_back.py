"""How long an engine holds tokens back: by hand, and so that deltas stay few."""

from __future__ import annotations

import pytest

from headrace.types import held_back_seconds


@pytest.mark.parametrize(
    ("running", "seconds"), [(0, 0.08), (1, 0.08), (400, 0.08), (500, 0.1), (1000, 0.2), (9000, 0.2)]
)
def test_by_hand(running: int, seconds: float) -> None:
    assert held_back_seconds(running) == pytest.approx(seconds)
    if running <= 1000:
        assert running / held_back_seconds(running) <= 5000 + 1e-6

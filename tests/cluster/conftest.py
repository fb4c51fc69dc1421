"""Without what hosts are made with, the tests of several hosts end at once, with one line that says what is missing."""

from __future__ import annotations

import pytest
from hosts import missing


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    if lacks := missing():
        pytest.exit(lacks, returncode=1)

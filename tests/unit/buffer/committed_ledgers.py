"""What a live journal has committed."""

from __future__ import annotations

from typing import Any

from headrace.buffer.journal import Journal, open_readonly


def committed(journal: Journal) -> dict[str, Any]:
    """Both ledgers, counted from everything that the journal has been given so far."""
    journal.flush()
    with open_readonly(journal.path) as reader:
        return reader.counts()

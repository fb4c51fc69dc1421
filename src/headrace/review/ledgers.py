"""Both ledgers of a run, and whether they balance: the data of `headrace ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.buffer.reader import open_readonly
from headrace.run_dir import RunDir


def read_ledgers(run_dir: Path) -> dict[str, Any]:
    """Read both ledgers of a run that is over, cut short or still running. `problems` is empty if they balance."""
    with open_readonly(RunDir(run_dir).journal) as journal:
        meta = journal.meta()
        problems = journal.imbalances()
        return {
            "name": meta.get("name"),
            "outcome": meta.get("outcome"),
            **journal.counts(),
            "sampled_tokens": journal.sampled_tokens(),
            "regenerated_tokens": journal.regenerated_tokens(),
            "restarts": journal.restarts(),
            "balanced": not problems,
            "problems": problems,
        }

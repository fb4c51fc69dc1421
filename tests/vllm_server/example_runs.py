"""The shipped example as tests run it: with the tests' vLLM, in a directory of theirs, with all patience."""

from __future__ import annotations

import sys
from pathlib import Path

from conftest import PYTHON, START_SECONDS

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from runs import ROOT

EXAMPLE = str(ROOT / "examples/vllm/vllm.toml")


def settings(directory: Path, *more: str) -> list[str]:
    every = [f"run.directory={directory}", "run.name=run", f"engine.python={Path(PYTHON).absolute()}"]
    every += [f"pipeline.start_seconds={START_SECONDS}", f"pipeline.stall_seconds={START_SECONDS}", *more]
    return [part for setting in every for part in ("--set", setting)]


def balanced(summary: dict[str, dict[str, int]]) -> dict[str, int]:
    for ledger in (summary["ledger"], summary["ledger_rollouts"]):
        assert ledger["admitted"] == ledger["trained"] + ledger["dropped"] + ledger["failed"], summary
    return summary["ledger"]

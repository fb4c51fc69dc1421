"""This module starts or resumes a run. The command line and the Python API both call these functions."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.buffer.database import check_resumable
from headrace.config import Config, dump_config, with_settings
from headrace.errors import DiskError, UserError
from headrace.observe.progress import Progress
from headrace.pipeline.inputs import check_inputs
from headrace.pipeline.session import RunSession
from headrace.run_dir import RunDir
from headrace.scoring.base import Scorer


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    run_dir: RunDir
    summary: dict[str, Any]
    outcome: str
    """`finished` or `interrupted`."""


def start_run(
    config: Config, progress: Progress, reward: Scorer | None = None, *, prompts: str | None = None
) -> Outcome:
    """Start a new run. A user's mistake that shows before the first version is served leaves no run directory behind.

    `reward` replaces the configured reward function. `prompts` holds JSON lines to write into the run directory, as
    `prompts.jsonl`.
    """
    run_dir = RunDir.create(config)
    session = None
    try:
        if prompts is not None:
            (run_dir.path / "prompts.jsonl").write_text(prompts)
        task, chat = check_inputs(config, reward)
        session = RunSession(config, run_dir, progress, task, chat)
        with run_dir.report_full_disk():
            summary = session.execute()
    except UserError as error:
        resumable = isinstance(error, DiskError) or (session is not None and session.began)
        if not (resumable and run_dir.journal.is_file()):
            shutil.rmtree(run_dir.path)
        raise
    return Outcome(run_dir, summary, session.outcome)


def resume_run(path: str | Path, progress: Progress, settings: Iterable[str] = ()) -> Outcome:
    """Continue a run from its newest checkpoint. `settings` change its configuration; the changes are shown.

    The changed configuration is kept once every process has started with it.
    """
    run_dir, before = RunDir.open(path)
    if not run_dir.journal.is_file():
        raise UserError(f"{path}: nothing to resume (it has no journal.db)")
    config = with_settings(before, settings)
    check_resumable(run_dir.journal)
    task, chat = check_inputs(config)
    for line in changes(before, config):
        progress.note(line)
    with run_dir.report_full_disk(), run_dir.with_trial_config(config):
        session = RunSession(config, run_dir, progress, task, chat)
        return Outcome(run_dir, session.execute(), session.outcome)


def changes(before: Config, after: Config) -> list[str]:
    """Return one line for each key that differs."""
    old, new = dump_config(before).splitlines(), dump_config(after).splitlines()
    gone, come = set(old) - set(new), set(new) - set(old)
    return [f"config was: {line}" for line in old if line in gone] + [
        f"config is:  {line}" for line in new if line in come
    ]

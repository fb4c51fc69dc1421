"""The file report.html shows what a run did. It is made from journal.db, timeline.json and config.toml."""

from __future__ import annotations

from pathlib import Path

from headrace.buffer.reader import open_readonly
from headrace.observe.report import Report, draw
from headrace.review.summary import summarize_journal
from headrace.run_dir import RunDir


def write_report(run_dir: Path) -> Path:
    """Write a run's `report.html`, whole or not at all, and return its path."""
    paths = RunDir(run_dir)
    with open_readonly(paths.journal) as journal:
        report = Report(
            directory=run_dir.name,
            meta=journal.meta(),
            summary=summarize_journal(journal),
            steps=journal.steps(),
            lag_tokens=journal.lag_tokens(),
            groups=journal.ended_groups(),
            training=journal.training_window(),
            deliveries=journal.deliveries(),
            samples=journal.samples(),
            timeline=paths.timeline,
            config=_text(paths.config),
        )
    part = paths.report.with_suffix(".html.part")
    part.write_text(draw(report), encoding="utf-8", errors="replace")
    part.replace(paths.report)
    return paths.report


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None

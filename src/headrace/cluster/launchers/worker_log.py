"""Worker output goes to `logs/<name>.log` in the run directory. All starts of one worker share one file."""

from __future__ import annotations

from pathlib import Path

from headrace.cluster.launchers.base import WorkerSpec

LAST_LINES = 12


def worker_log(spec: WorkerSpec) -> Path:
    """Return the path of this worker's log, and create its directory."""
    logs = Path(spec.run_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{spec.name}.log"


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """Return the last lines of a log file, for an error message."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return "\n".join(text.strip().splitlines()[-count:])

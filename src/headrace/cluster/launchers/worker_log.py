"""What workers print goes to `logs/<name>.log` in the run directory, one file for all starts of a worker."""

from __future__ import annotations

from pathlib import Path

from headrace.cluster.launchers.base import WorkerSpec

LAST_LINES = 12


def worker_log(spec: WorkerSpec) -> Path:
    """Where this worker's output goes; the directory is there."""
    logs = Path(spec.run_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"{spec.name}.log"


def last_lines(log: Path, count: int = LAST_LINES) -> str:
    """The end of a log file, for an error message."""
    text = log.read_text(errors="replace") if log.is_file() else ""
    return "\n".join(text.strip().splitlines()[-count:])

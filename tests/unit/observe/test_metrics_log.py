import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from headrace.observe.metrics import MetricsLog, read_metrics


def test_records_are_on_disk_before_the_log_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headrace.observe.metrics.time.time", lambda: 12.5)
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write("step", step=1, loss=np.float32(0.5), lags=np.array([1, 2]))
    log.write("evaluation", pass_1=float("nan"))
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"time": 12.5, "kind": "step", "step": 1, "loss": 0.5, "lags": [1, 2]},
        {"time": 12.5, "kind": "evaluation", "pass_1": None},
    ]
    log.close()
    log.close()


def test_a_torn_line_is_skipped_and_does_not_swallow_the_next(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n{"kind": "st')
    with closing(MetricsLog(path)) as log:
        log.write("step", step=3)
    records = read_metrics(path)
    assert [record["step"] for record in records] == [1, 3]


def test_a_resumed_run_appends(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with closing(MetricsLog(path)) as log:
            log.write("step", step=step)
    assert path.read_bytes().count(b"\n") == 2
    assert [record["step"] for record in read_metrics(path)] == [1, 2]


def test_bad_bytes_and_values_that_are_no_records(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\xfe\n\n[1]\n{"kind": "ok"}\n')
    assert read_metrics(path) == [{"kind": "ok"}]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_value_that_is_no_metric_is_refused(tmp_path: Path):
    with (
        closing(MetricsLog(tmp_path / "metrics.jsonl")) as log,
        pytest.raises(NotImplementedError, match="cannot be a object"),
    ):
        log.write("step", value=object())

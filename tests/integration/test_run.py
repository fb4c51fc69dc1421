"""A whole run, real processes and all: what it writes is true, and nothing of it stays behind."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from runs import ROOT, recompute, segments_left, small_config, worker_pids
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace import Run
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    config = small_config(
        directory, "run.versions=6", "training.checkpoint_every=1", "training.keep_checkpoints=20", "evaluate.every=2"
    )
    outcome = start_run(config, NoProgress())
    assert outcome.outcome == "finished"
    return outcome.run_dir.path


def rows(run_dir: Path, sql: str) -> list[tuple]:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return db.execute(sql).fetchall()


def test_the_summary_follows_from_the_journal(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    meta = {key: json.loads(value) for key, value in rows(finished, "SELECT key, value FROM meta")}
    evaluations = dict(rows(finished, "SELECT moment, pass_1 FROM evaluations"))
    states = Counter(state for (state,) in rows(finished, "SELECT state FROM groups"))
    lags: Counter[int] = Counter()
    for (text,) in rows(finished, "SELECT lag_histogram FROM steps WHERE objective = 'policy'"):
        lags.update({int(lag): tokens for lag, tokens in json.loads(text).items()})
    trained = sum(n for (n,) in rows(finished, "SELECT trained_tokens FROM steps WHERE objective = 'policy'"))
    seconds = meta["train_ended"] - meta["train_started"]

    assert summary["heldout_before"] == evaluations["before"]
    assert summary["heldout_after"] == evaluations["after"]
    assert summary["train_seconds"] == pytest.approx(seconds)
    assert summary["tokens_generated"] == sum(n for (n,) in rows(finished, "SELECT sampled_tokens FROM rollouts"))
    assert summary["tokens_trained"] == trained == lags.total()
    assert summary["tokens_per_second"] == pytest.approx(trained / seconds)
    assert summary["lag_mean"] == pytest.approx(sum(lag * n for lag, n in lags.items()) / lags.total())
    assert summary["lag_max"] == max(lags)
    assert summary["lag_bound"] == meta["lag_bound"] == 3
    assert summary["ledger"] == {
        "admitted": states.total(),
        "trained": states["trained"],
        "dropped": states["dropped"],
        "failed": states["failed"],
        "in_flight": states["in_flight"],
    }
    assert summary["versions"] == rows(finished, "SELECT count(*) FROM versions")[0][0] == 7
    assert summary["deliveries_proved"] == rows(finished, "SELECT sum(accepted) FROM deliveries")[0][0] == 7
    for role in ("trainer", "engine"):
        busy = total = 0.0
        sql = f"SELECT started, ended, busy_seconds FROM activity WHERE process = '{role}-0'"
        for started, ended, busy_seconds in rows(finished, sql):
            inside = max(0.0, min(ended, meta["train_ended"]) - max(started, meta["train_started"]))
            busy += busy_seconds * inside / max(ended - started, 1e-9)
            total += inside
        assert summary[f"{role}_idle_fraction"] == pytest.approx(1 - busy / total, abs=1e-6)


def test_friction_49_each_evaluation_of_a_real_run_is_of_one_version(finished: Path) -> None:
    found = rows(finished, "SELECT moment, version, versions, tokens_mean * prompts FROM evaluations ORDER BY started")
    assert [(moment, version) for moment, version, *_ in found] == [
        ("before", 0),
        ("during", 2),
        ("during", 4),
        ("after", 6),
    ]
    for _, version, versions, tokens in found:
        assert json.loads(versions) == {str(version): pytest.approx(tokens)}


def test_the_ledgers_balance_and_lag_keeps_its_bound(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    ledger = summary["ledger"]
    assert ledger["admitted"] == ledger["trained"] == 6 * 4
    assert summary["ledger_rollouts"]["trained"] == 6 * 4 * 4
    assert summary["lag_max"] <= summary["lag_bound"]
    assert summary["outcome"] == "finished"
    parents = dict(rows(finished, "SELECT id, parent FROM versions"))
    assert parents == {version: version - 1 for version in range(7)}


def test_every_recorded_token_is_what_its_version_says(finished: Path) -> None:
    """The heart of it: a plain Hugging Face forward under the tagged version gives the recorded log-probability."""
    compared, _ = recompute(finished)
    assert compared > 200


def test_the_checkpoint_is_a_model_directory(finished: Path) -> None:
    run = Run(finished)
    model = AutoModelForCausalLM.from_pretrained(run.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(run.model_dir)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "cab"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert model.generate(**tokens, max_new_tokens=3).shape[1] == tokens["input_ids"].shape[1] + 3
    assert len(run.history) == 6
    assert {"reward", "loss", "lag_mean"} <= run.history[-1].keys()


def test_the_run_directory_is_complete(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {
        "config.toml", "journal.db", "segments", "metrics.jsonl", "timeline.json", "checkpoints", "summary.json",
        "report.html", "logs",
    } <= names  # fmt: skip
    events = json.loads((finished / "timeline.json").read_text())
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert {"decode", "publish"} <= spans
    evaluated = rows(finished, "SELECT moment, version FROM evaluations ORDER BY version")
    assert evaluated[0] == ("before", 0)
    assert evaluated[-1] == ("after", 6)
    assert ("during", 2) in evaluated or ("during", 4) in evaluated


def test_its_learning_curve_can_be_drawn(finished: Path, tmp_path: Path) -> None:
    run_dir, picture = tmp_path / "run", tmp_path / "curve.svg"
    run_dir.mkdir()
    with sqlite3.connect(finished / "journal.db") as run, sqlite3.connect(run_dir / "journal.db") as mine:
        run.backup(mine)
        # So small a run learns nothing.
        mine.execute("UPDATE evaluations SET pass_1 = 0.1 + version / 20.0, prompts = 100")
    command = [sys.executable, str(ROOT / "benchmarks" / "learning_curve.py")]
    done = subprocess.run([*command, str(run_dir), "--svg", str(picture)], capture_output=True, text=True, check=True)
    # 0.3 over the root of 0.1 * 0.9 / 100 + 0.4 * 0.6 / 100.
    known = "held out 0.100 -> 0.400 (100 and 100 prompts): +0.300, 5.2 standard errors, 6 steps in "
    assert done.stdout.startswith(known)
    drawn = ElementTree.fromstring(picture.read_text())
    assert len(drawn.findall(".//{*}path")) >= 2
    wrong = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert wrong.returncode == 1 and wrong.stderr.startswith("learning_curve.py: ") and wrong.stderr.count("\n") == 1


def test_nothing_stays_behind(finished: Path) -> None:
    assert worker_pids(finished) == {}
    assert segments_left() == set()

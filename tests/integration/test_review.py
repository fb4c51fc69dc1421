"""A real run, looked into: its ledgers while it goes on, its rollouts, and an audit that sees tampering."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import headrace, small_config
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from headrace import Run
from headrace.channel.codec import encode
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.review.audit import Audit, audit
from headrace.review.recompute import PlainModel
from headrace.review.summary import read_ledgers


class Watcher(threading.Thread):
    """Reads the ledgers of a live run, again and again."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(daemon=True)
        self.run_dir = run_dir
        self.over = threading.Event()
        self.seen: list[dict[str, Any]] = []

    def run(self) -> None:
        while not self.over.wait(0.1):
            # The tables come a moment after the file.
            if (self.run_dir / "metrics.jsonl").is_file():
                self.seen.append(read_ledgers(self.run_dir))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("runs")
    config = small_config(
        directory, "training.checkpoint_every=1", "training.keep_checkpoints=20", "rollouts.temperature=0.7"
    )
    watcher = Watcher(directory / "run")
    watcher.start()
    try:
        outcome = start_run(config, NoProgress())
    finally:
        watcher.over.set()
        watcher.join(60)
    assert outcome.outcome == "finished"
    return outcome.run_dir.path, watcher.seen


@pytest.fixture
def finished(watched: tuple[Path, list[dict[str, Any]]]) -> Path:
    return watched[0]


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def audited(run_dir: Path) -> Audit:
    return audit(run_dir, PlainModel, samples=1000)


def test_the_ledgers_balance_at_every_moment(watched: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, seen = watched
    assert [ledgers["problems"] for ledgers in seen if not ledgers["balanced"]] == []
    assert any(ledgers["outcome"] == "running" and ledgers["groups"]["in_flight"] for ledgers in seen)
    done = headrace("ledger", str(run_dir), "--json")
    summary = Run(run_dir).summary
    ledgers = json.loads(done.stdout)
    assert done.returncode == 0 and ledgers["balanced"]
    assert ledgers["groups"] == {**summary["ledger"], "reasons": summary["reasons"]}
    assert ledgers["rollouts"]["trained"] == 4 * 4 * 4
    assert sum(ledgers["sampled_tokens"].values()) == summary["tokens_generated"]
    assert headrace("ledger", str(run_dir)).stdout.endswith("balanced\n")


def test_books_that_do_not_balance_end_with_1(copied: Path) -> None:
    with sqlite3.connect(copied / "journal.db") as db:
        db.execute("UPDATE rollouts SET state = 'dropped', step = NULL, checksum = NULL WHERE id = '0/0'")
    done = headrace("ledger", str(copied))
    assert done.returncode == 1
    assert "rollouts that disagree with their group: 0/0" in done.stdout


def test_rollouts_are_shown_and_exported_as_recorded(finished: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    done = headrace("rollouts", str(finished), "--where", "reward < 1", "--export", str(file), "--text")
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(Run(finished).model_dir)
    exported = {entry["id"]: entry for entry in map(json.loads, file.read_text().splitlines())}
    rollouts = {rollout.id: rollout for rollout in Run(finished).rollouts("reward < 1")}
    assert exported.keys() == rollouts.keys() and len(exported) > 10
    for name, rollout in rollouts.items():
        (trace,) = rollout.traces
        for key in ("token_ids", "logprobs", "versions", "trained"):
            np.testing.assert_array_equal(np.array(exported[name][key]), getattr(trace, key))
        assert exported[name]["text"] == tokenizer.decode(trace.token_ids[trace.trained])
    shown = headrace("rollouts", str(finished), "--limit", "2", "--text").stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["id", "0/0", "0/1", "2"]
    listed = json.loads(headrace("rollouts", str(finished), "--where", "step = 1", "--json").stdout)
    assert len(listed) == 16 and {entry["step"] for entry in listed} == {1}


def test_a_bad_condition_is_one_line(finished: Path) -> None:
    done = headrace("rollouts", str(finished), "--where", "rewrd > 0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headrace: --where 'rewrd > 0': no such column: rewrd")
    assert len(done.stderr.splitlines()) == 1


def test_an_honest_run_passes(finished: Path) -> None:
    done = headrace("audit", str(finished), "--samples", "1000", "--tolerance", "1e-4", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["problems"], found["passed"]) == (0, [], True)
    # The weights before the first step are no checkpoint of this run: they were drawn at random.
    checkable = list(Run(finished).rollouts("newest_version >= 1"))
    assert (found["recorded"], found["checkable"], found["drawn"]) == (64, len(checkable), len(checkable))
    tokens = sum(rollout.trained_tokens for rollout in checkable)
    assert found["tokens_compared"] + sum(found["not_checkable"].values()) == tokens
    compared = [entry for entry in found["versions"] if entry["tokens"]]
    assert found["tokens_compared"] > 200 and len(compared) >= 2
    for entry in compared:
        assert 0 <= entry["mean_error"] <= entry["max_error"] < 1e-4
        assert (entry["accepted"], entry["rejected"]) == (1, 0)
        assert entry["canary_error"] < 1e-3


def test_friction_54_an_audit_takes_the_recorded_temperature_and_not_that_of_the_configuration(copied: Path) -> None:
    config = copied / "config.toml"
    changed = config.read_text().replace("\ntemperature = 0.7\n", "\ntemperature = 1.0\n")
    assert changed != config.read_text()
    config.write_text(changed)
    assert audited(copied).problems == []


def test_a_recorded_number_that_was_changed_is_found(copied: Path) -> None:
    """The record is sound and the journal knows no better: only the weights tell."""
    version = max(entry.version for entry in audited(copied).versions if entry.tokens)
    target = next(Run(copied).rollouts(f"newest_version = {version}"))
    trace = target.traces[0]
    place = int(np.flatnonzero(trace.versions == version)[0])
    trace.logprobs = trace.logprobs.copy()
    trace.logprobs[place] -= 0.01
    with sqlite3.connect(copied / "journal.db") as db:
        row = db.execute("SELECT segment, offset, length FROM rollouts WHERE id = ?", (target.id,)).fetchone()
    frames = encode(target)
    payload = b"".join([struct.pack(f"<{len(frames) + 1}I", len(frames), *map(len, frames)), *frames])
    record = struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    assert len(record) == row[2]
    with (copied / "segments" / row[0]).open("r+b") as file:
        file.seek(row[1])
        file.write(record)
    (problem,) = audited(copied).problems
    told = headrace("audit", str(copied))
    assert told.returncode == 1
    assert told.stderr == f"headrace: {copied}: 1 found wrong, the first: {problem}\n"
    assert problem.startswith(f"rollout {target.id}: token {place} of trace 0, sampled by version {version}")
    assert "error 0.01;" in problem
    done = headrace("audit", str(copied), "--samples", "1000")
    assert done.returncode == 1 and f"rollout {target.id}" in done.stdout and "FAILED" in done.stdout


def test_a_checkpoint_that_was_changed_is_found(copied: Path) -> None:
    entry = next(entry for entry in audited(copied).versions if entry.tokens)
    weights = copied / "checkpoints" / str(entry.weights) / "model.safetensors"
    tensors = load_file(weights)
    name = max(tensors, key=lambda key: tensors[key].size)
    tensors[name] = tensors[name] * np.float32(1.1)
    size = weights.stat().st_size
    save_file(tensors, weights, metadata={"format": "pt"})
    assert weights.stat().st_size == size, "or it would not be taken for a checkpoint"
    problems = audited(copied).problems
    assert any(str(entry.weights) in line and "was published as" in line for line in problems)
    named = [line for line in problems if line.startswith("rollout ")]
    assert named and all(f"sampled by version {entry.version}," in line for line in named)


def test_without_checkpoints_it_says_that_nothing_was_checked(copied: Path) -> None:
    shutil.rmtree(copied / "checkpoints")
    done = headrace("audit", str(copied))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "nothing could be checked" in done.stderr
    assert "[training] checkpoint_every" in done.stderr
    assert done.stdout == ""
    found = json.loads(headrace("audit", str(copied), "--json").stdout)
    assert "their version has no checkpoint" in json.dumps(found)

"""A run whose trainer is two processes: proved deliveries, a checkpoint that one resumes, a death with a name."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import QUICKSTART, headrace, segments_left, small_settings, start, worker_pids
from transformers import AutoModelForCausalLM

import headrace as library
from headrace.models.loading import load_model
from headrace.training.checkpoints.base import latest
from waiting import until

pytestmark = pytest.mark.slow


def settings(directory: Path, *more: str) -> list[str]:
    return [part for setting in small_settings(directory, *more) for part in ("--set", setting)]


def export(run_dir: Path, out: Path) -> Path:
    done = headrace("export", str(run_dir), "--to", "hf", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert not (out / "trainer").exists() and not list(out.glob(".*")) and (out / "tokenizer.json").is_file()
    return out


def plain_weights(directory: Path) -> dict[str, torch.Tensor]:
    """As anybody loads them; a warning of weights that are missing is an error."""
    model, said = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_two_ranks_train_and_one_goes_on(tmp_path: Path) -> None:
    two = ("training.ranks=2", "run.versions=2", "evaluate.prompts=0", "buffer.depth=0", "training.checkpoint_every=1")
    run = headrace("train", str(QUICKSTART), *settings(tmp_path, *two), "--json")
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert summary["deliveries_proved"] == 3
    assert summary["deliveries_rejected"] == 0
    run_dir = tmp_path / "run"
    assert worker_pids(run_dir) == {}
    assert segments_left() == set()
    checkpoint = latest(run_dir / "checkpoints")
    assert checkpoint is not None
    exported = export(run_dir, tmp_path / "exported")

    audit = headrace("audit", str(run_dir))
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert library.Run(run_dir).model_dir == checkpoint
    whole = plain_weights(checkpoint)
    assert_equal(plain_weights(exported), whole)
    assert_equal(plain_weights(export(run_dir, tmp_path / "again")), whole)
    generation = "generation_config.json"
    assert (exported / generation).read_bytes() == (checkpoint / generation).read_bytes()

    again = headrace("resume", str(run_dir), "--set", "training.ranks=1", "--set", "run.versions=3", "--json")
    assert again.returncode == 0, again.stderr
    with sqlite3.connect(run_dir / "journal.db") as db:
        steps = [step for (step,) in db.execute("SELECT step FROM steps WHERE objective = 'policy' ORDER BY step")]
    assert steps == [1, 2, 3]


def test_two_ranks_with_a_teacher_a_reference_and_muon(tmp_path: Path) -> None:
    """The reference is that of a warm start: one rank finds it in the checkpoint of two."""
    model = library.load_config(QUICKSTART).model
    load_model(model.path, weights="random", seed=9).save_pretrained(tmp_path / "teacher")
    policies = ("algorithm.loss=distillation", f"algorithm.teacher={tmp_path / 'teacher'}", "algorithm.kl=k3")
    training = ("training.ranks=2", "training.optimizer=muon", "training.learning_rate=1e-3")
    short = ("run.versions=2", "evaluate.prompts=0")
    run = headrace("train", str(QUICKSTART), *settings(tmp_path, *training, *short, *policies), "--json")
    assert run.returncode == 0, run.stderr
    run_dir = tmp_path / "run"
    again = headrace("resume", str(run_dir), "--set", "training.ranks=1", "--set", "run.versions=3", "--json")
    assert again.returncode == 0, again.stderr
    history = library.Run(run_dir).history
    assert all(step["teacher_kl"] > 0.01 for step in history)
    divergences = [step["reference_kl"] for step in history]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert 1e-6 < divergences[1] < divergences[2]


def wait(holds: Callable[[], object], seconds: float) -> None:
    asyncio.run(until(holds, seconds))


def test_an_engine_that_starts_again_is_sent_all_parts(tmp_path: Path) -> None:
    """Deltas of two ranks: the engine does not hold their base any more, so both ranks send their parts again."""
    deltas = ("training.ranks=2", "engine.count=2", "delivery.send=delta", "delivery.dtype=bfloat16")
    run = start("train", str(QUICKSTART), *settings(tmp_path, *deltas, "run.versions=500", "evaluate.prompts=0"))
    run_dir = tmp_path / "run"

    def answers() -> list[tuple[int, str]]:
        with sqlite3.connect(f"file:{run_dir / 'journal.db'}?mode=ro", uri=True) as db:
            rows = "SELECT accepted, reason FROM deliveries WHERE engine = 'engine-1' ORDER BY rowid"
            return [(accepted, reason) for accepted, reason in db.execute(rows)]

    try:
        wait((run_dir / "metrics.jsonl").is_file, 150)
        # The first version is whole: an engine that only knows that one is sent nothing that it cannot use.
        wait(lambda: sum(accepted for accepted, _ in answers()) >= 4, 100)
        os.kill(worker_pids(run_dir)["engine-1"], signal.SIGKILL)
        wait(lambda: any("is a change to version" in reason for _, reason in answers()), 100)
        wait(lambda: answers()[-1][0] == 1, 100)
        run.send_signal(signal.SIGINT)
        _, stderr = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 130, stderr
    assert all("is a change to version" in reason for accepted, reason in answers() if not accepted)


def test_a_dead_rank_ends_the_run_with_its_name(tmp_path: Path) -> None:
    run = start("train", str(QUICKSTART), *settings(tmp_path, "training.ranks=2", "run.versions=500"))
    run_dir = tmp_path / "run"
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline and not (run_dir / "metrics.jsonl").is_file():
        time.sleep(0.1)
    os.kill(worker_pids(run_dir)["trainer-1"], signal.SIGKILL)
    _, stderr = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "headrace: trainer-1 died: killed by signal 9" in stderr
    assert worker_pids(run_dir) == {}
    assert segments_left() == set()

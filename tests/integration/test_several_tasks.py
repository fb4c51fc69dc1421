"""A run with two tasks draws from both by weight, tells them apart in every record, and survives a kill."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sqlite3
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from runs import ROOT, headrace, start

import headrace as library
from headrace.config import load_config
from headrace.errors import UserError
from headrace.observe.metrics import read_metrics
from headrace.pipeline.inputs import make_task
from headrace.tasks.mixture import make_source
from waiting import until

REWARDS = """
def right(completion, answer):
    return {"reward": float(completion == answer), "letters": len(completion)}


def short(completion):
    return 1 / (1 + len(completion))
"""
QUICKSTART = ROOT / "examples/quickstart"


def configured(directory: Path, **changes: Any) -> Path:
    """A file of a small run with two tasks, whose rows have the same ids."""
    (directory / "rewards.py").write_text(REWARDS)
    rows = [json.loads(line) for line in (QUICKSTART / "train.jsonl").read_text().splitlines()[:60]]
    for name, own in (("sorting", rows[:40]), ("brevity", rows[40:])):
        lines = [json.dumps({**row, "id": number}) for number, row in enumerate(own)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines))
    given: dict[str, Any] = {
        "model": {"path": str(QUICKSTART / "model"), "weights": "random"},
        "tasks": {
            "sorting": {"kind": "dataset", "path": "sorting.jsonl", "reward": "rewards.py:right", "weight": 2},
            "brevity": {"kind": "dataset", "path": "brevity.jsonl", "reward": ["rewards.py:short"], "weight": 1},
        },
        "run": {"directory": str(directory), "name": "two", "versions": 6},
        "rollouts": {"group_size": 2, "max_tokens": 8},
        "buffer": {"groups": 6},
        "engine": {"slots": 16, "max_length": 64},
        "warm_start": {"steps": 1, "batch": 4, "learning_rate": 1e-3},
        "evaluate": {"prompts": 3, "every": 0},
        "training": {"checkpoint_every": 2},
        "observe": {"display": "plain"},
    }
    file = directory / "two.toml"
    file.write_text(tomli_w.dumps({**given, **changes}))
    return file


def prompts_of(run_dir: Path) -> list[str]:
    with sqlite3.connect(run_dir / "journal.db") as db:
        return [prompt for (prompt,) in db.execute("SELECT prompt FROM groups ORDER BY id")]


def expected(file: Path, count: int) -> list[str]:
    """The prompts of an undisturbed run, in the order of their draws."""
    config = load_config(file)
    task = make_task(config)
    source = make_source(task, config.run.seed)
    return [source.draw().id for _ in range(count)]


def test_check_shows_each_task(tmp_path: Path) -> None:
    file = configured(tmp_path)
    shown = headrace("check", str(file))
    assert shown.returncode == 0, shown.stderr
    assert "prompts     54 to train on, 6 held out" in shown.stdout
    assert "task        sorting: 66.7% of the prompts; 37 to train on, 3 held out" in shown.stdout
    assert "task        brevity: 33.3% of the prompts; 17 to train on, 3 held out" in shown.stdout
    assert shown.stdout.count("\nprompt      ") == 2
    wrong = headrace("check", str(file), "--set", f"tasks.brevity.reward={tmp_path}/rewards.py:gone")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("headrace: [tasks.brevity] reward: "), wrong.stderr
    refused = headrace("check", str(file), "--set", "tasks.sorting.weight=0")
    assert (refused.returncode, refused.stderr) == (2, "headrace: [tasks.sorting] weight: expected `float` > 0.0\n")


def test_a_heldout_prompt_of_one_task_is_not_trained_on_in_another(tmp_path: Path) -> None:
    file = configured(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "sorting.jsonl").read_text().splitlines()]
    (tmp_path / "heldout.jsonl").write_text("\n".join(json.dumps({**row, "id": f"h{row['id']}"}) for row in rows))
    found = headrace("check", str(file), "--set", f"tasks.brevity.heldout_path={tmp_path}/heldout.jsonl")
    assert found.returncode == 2
    assert "this prompt is also trained on" in found.stderr


def test_two_tasks_in_one_run(tmp_path: Path) -> None:
    file, run_dir = configured(tmp_path), tmp_path / "two"
    done = headrace("train", str(file))
    assert done.returncode == 0, done.stderr
    drawn = prompts_of(run_dir)
    assert drawn == expected(file, len(drawn))
    assert abs(sum(prompt.startswith("sorting/") for prompt in drawn) - len(drawn) * 2 / 3) < 3

    records = read_metrics(run_dir / "metrics.jsonl")
    steps = [record for record in records if record["kind"] == "step" and record["objective"] == "policy"]
    assert len(steps) == 6
    for step in steps:
        counts = {name: step.get(f"{name}/groups", 0) for name in ("sorting", "brevity")}
        assert sum(counts.values()) == 6
        mean = sum(count * step[f"{name}/reward"] for name, count in counts.items() if count) / 6
        assert abs(mean - step["reward"]) < 1e-6, "the whole is the mean of the domains"
        for name in (name for name, count in counts.items() if count):
            assert {f"{name}/{key}" for key in ("length_mean", "zero_variance", "sampled_entropy")} <= step.keys()
    assert any(step.get("sorting/score/reward") is not None and "sorting/extra/letters" in step for step in steps)
    assert any(step.get("brevity/score/short") == step["brevity/reward"] for step in steps if "brevity/reward" in step)
    assert {record["task"] for record in records if record["kind"] == "group"} == {"sorting", "brevity"}
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert all((e["sorting/prompts"], e["brevity/prompts"]) == (3, 3) for e in evaluations)
    assert all(e["pass_1"] == (e["sorting/pass_1"] + e["brevity/pass_1"]) / 2 for e in evaluations)

    summary = json.loads((run_dir / "summary.json").read_text())
    assert set(summary["evaluations"][0]["tasks"]) == {"sorting", "brevity"}
    assert "\n  sorting " in done.stdout
    page = (run_dir / "report.html").read_text()
    assert "Reward of each task" in page and "sorting/reward" in page
    shown = headrace("rollouts", str(run_dir), "--where", "task = 'brevity'", "--json")
    rows = json.loads(shown.stdout)
    assert rows and {row["task"] for row in rows} == {"brevity"}
    assert all(row["prompt"].startswith("brevity/") for row in rows)
    table = headrace("rollouts", str(run_dir))
    assert table.stdout.splitlines()[0].split()[:2] == ["id", "task"]
    exported = headrace("rollouts", str(run_dir), "--export", str(tmp_path / "all.parquet"))
    assert exported.returncode == 0, exported.stderr


def test_a_killed_run_goes_on_with_the_prompts_that_follow(tmp_path: Path) -> None:
    file, run_dir = (
        configured(tmp_path, run={"directory": str(tmp_path), "name": "two", "versions": 40}),
        tmp_path / "two",
    )
    run = start("train", str(file))
    try:
        metrics = run_dir / "metrics.jsonl"

        def trained() -> bool:
            return sum(record["kind"] == "version" for record in read_metrics(metrics)) > 4 or run.poll() is not None

        asyncio.run(until(trained, 120))
        assert run.poll() is None, run.communicate()
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
    before = len(prompts_of(run_dir))
    resumed = headrace("resume", str(run_dir))
    assert resumed.returncode == 0, resumed.stderr
    drawn = prompts_of(run_dir)
    assert len(drawn) > before
    assert drawn == expected(file, len(drawn)), "the order is that of an undisturbed run"
    assert json.loads((run_dir / "summary.json").read_text())["outcome"] == "finished"


def test_kinds_can_be_mixed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ROOT / "tests/data/tiny_model", model)
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**described, "max_position_embeddings": 4096}))
    rows = json.loads((QUICKSTART / "train.jsonl").read_text().splitlines()[0])
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({**rows, "prompt": f"{i}"}) for i in range(9)))
    tasks = {
        "text": {"kind": "dataset", "path": "text.jsonl", "reward": "rewards.py:short", "format": "text"},
        "gym": {"kind": "gym", "name": "spell_backward"},
        "tool": {"kind": "environment", "factory": "headrace.tasks.calculator:CalculatorTask"},
    }
    file = configured(
        tmp_path,
        model={"path": str(model), "weights": "random"},
        tasks=tasks,
        run={"directory": str(tmp_path), "name": "mixed", "versions": 2},
        engine={"slots": 16, "max_length": 1024},
        warm_start={"steps": 0},
        evaluate={"prompts": 2, "every": 0},
    )
    done = headrace("train", str(file))
    assert done.returncode == 0, done.stderr
    drawn = prompts_of(tmp_path / "mixed")
    assert {prompt.partition("/")[0] for prompt in drawn} == set(tasks)
    steps = [record for record in read_metrics(tmp_path / "mixed" / "metrics.jsonl") if record["kind"] == "step"]
    keys = {key for step in steps for key in step}
    assert {"text/score/reward", "gym/score/verifier", "gym/extra/answered", "tool/score/environment"} <= keys


def test_several_tasks_from_python(tmp_path: Path) -> None:
    sections = tomllib.loads(configured(tmp_path).read_text())
    tasks = {
        name: {**task, "path": f"{tmp_path}/{task['path']}", "reward": f"{tmp_path}/rewards.py:short"}
        for name, task in sections.pop("tasks").items()
    }
    del sections["run"], sections["observe"], sections["evaluate"]
    for versions in (1, 2):  # The second call resumes the run.
        settings = {"directory": str(tmp_path), "name": "api", "versions": versions}
        run = library.train(tasks=tasks, run=settings, resume=True, display="none", **sections)
        assert len(run.history) == versions
    assert {key.partition("/")[0] for step in run.history for key in step if "/reward" in key} >= set(tasks)
    with pytest.raises(UserError, match=r"^\[tasks\]: \[task\] is given too"):
        library.train(tasks=tasks, reward=len, display="none", **sections)

"""Data by name: datasets from a server that speaks the hub's API, from a cache without network, and from files."""

from __future__ import annotations

import io
import json
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hub_commands import command, refused, settings
from hub_server import HubServer, Repository
from runs import QUICKSTART, ROOT

from headrace import Run

LINES = [json.loads(line) for line in (ROOT / "examples/quickstart/train.jsonl").read_text().splitlines()[:60]]
ROWS = [{"question": line["prompt"], "solution": line["answer"], "level": n} for n, line in enumerate(LINES)]
CARD = b"""---
configs:
- config_name: main
  default: true
  data_files:
  - split: train
    path: main/train.parquet
  - split: test
    path: main/test.parquet
- config_name: hard
  data_files:
  - split: train
    path: hard/train.parquet
---
# Sums
"""
FIELDS = 'task.fields={prompt = "question", answer = "solution"}'


def parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


@pytest.fixture
def hub() -> Iterator[HubServer]:
    files = {
        "README.md": CARD,
        "main/train.parquet": parquet(ROWS[:40]),
        "main/test.parquet": parquet(ROWS[40:50]),
        "hard/train.parquet": parquet(ROWS[50:]),
    }
    overlapping = {**files, "main/test.parquet": parquet(ROWS[30:50])}
    repositories = {"datasets/acme/sums": Repository({"main": files, "overlapping": overlapping})}
    with HubServer(repositories) as server:
        yield server


def given(home: Path, path: object, *more: str) -> list[str]:
    """Settings that replace the quickstart's files by another source of the same questions."""
    without = ["task.heldout_path=", "evaluate.prompts=4", "task.demonstration=answer", FIELDS]
    return settings(home, *without, f"task.path={path}", *more)


def check(home: Path, path: object, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return command(home, "check", str(QUICKSTART), *given(home, path, *more), "--json", **variables)


def counts(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return found["train_prompts"], found["heldout_prompts"]


@pytest.mark.slow
def test_a_run_takes_its_prompts_by_name_and_resumes_with_the_same_commit(tmp_path: Path, hub: HubServer) -> None:
    chosen = given(tmp_path, "acme/sums", "task.heldout_split=test", "run.versions=2")
    done = command(tmp_path, "train", str(QUICKSTART), *chosen, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    run_dir, commit = tmp_path / "run", hub.repositories["datasets/acme/sums"].commit("main")
    saved = tomllib.loads((run_dir / "config.toml").read_text())["task"]
    assert (saved["path"], saved["revision"]) == ("acme/sums", commit)
    hub.repositories["datasets/acme/sums"].revisions["main"] = {"README.md": b"all gone"}
    again = command(tmp_path, "resume", str(run_dir), "--set", "run.versions=4", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    rollouts = list(Run(run_dir).rollouts())
    assert rollouts
    assert any(rollout.reward for rollout in rollouts if rollout.reward is not None) or not any(
        rollout.ending == "failed" for rollout in rollouts
    )


def test_splits_and_subsets(tmp_path: Path, hub: HubServer) -> None:
    endpoint = {"HF_ENDPOINT": hub.url}
    assert counts(check(tmp_path, "acme/sums", "task.heldout_split=test", **endpoint)) == (40, 4)
    assert counts(check(tmp_path, "acme/sums", "task.subset=hard", HF_HUB_OFFLINE="1")) == (6, 4)
    assert counts(check(tmp_path, "acme/sums", "evaluate.prompts=0", HF_HUB_OFFLINE="1")) == (40, 0)
    wrong = {
        ("task.split=validation",): "acme/sums cannot be read: ",
        ("task.subset=easy",): "acme/sums cannot be read: ",
    }
    for more, line in wrong.items():
        assert refused(check(tmp_path, "acme/sums", *more, HF_HUB_OFFLINE="1")).startswith(
            f"headrace: [task] path: {line}"
        )
    both = ("task.revision=overlapping", "task.heldout_split=test", "evaluate.prompts=20")
    line = refused(check(tmp_path, "acme/sums", *both, **endpoint))
    assert line == (
        "headrace: acme/sums, split test, row 1: this prompt is also trained on (acme/sums, split train, row 31)"
    )


def test_names_that_lead_nowhere_and_broken_downloads_are_one_line(tmp_path: Path, hub: HubServer) -> None:
    endpoint = {"HF_ENDPOINT": hub.url}
    line = refused(check(tmp_path, "acme/nothing", **endpoint))
    assert line.startswith("headrace: [task] path: there is no file acme/nothing, and no such dataset at ")
    line = refused(check(tmp_path, "acme/sums", "task.revision=v9", **endpoint))
    assert line == f"headrace: [task] path: acme/sums at {hub.url} has no revision 'v9'"
    assert "HF_HUB_OFFLINE is set" in refused(check(tmp_path, "acme/sums", HF_HUB_OFFLINE="1"))
    hub.cuts["main/train.parquet"] = 1000
    assert "could not be fetched" in refused(check(tmp_path, "acme/sums", **endpoint))
    hub.cuts.clear()
    assert counts(check(tmp_path, "acme/sums", **endpoint)) == (36, 4)


def test_files_by_the_end_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(parquet(ROWS))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("rows.parquet", "rows.json", "rows.jsonl"):
        assert counts(check(tmp_path, tmp_path / name)) == (56, 4)


def test_what_needs_the_package_datasets_says_so(tmp_path: Path, hub: HubServer) -> None:
    (tmp_path / "rows.parquet").write_bytes(parquet(ROWS))
    (tmp_path / "without").mkdir()
    (tmp_path / "without/datasets.py").write_text("raise ImportError('it is not installed here')\n")
    for path in (tmp_path / "rows.parquet", "acme/sums"):
        line = refused(check(tmp_path, path, HF_ENDPOINT=hub.url, PYTHONPATH=f"{tmp_path}/without:{ROOT}/src"))
        said = f'{path} is read through the package datasets: pip install "headrace[data]"'
        assert line == f"headrace: [task] path: {said}"

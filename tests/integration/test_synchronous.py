"""Depth 0: one seed, one result, and the result is what plain Hugging Face and torch give for the same tokens."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from runs import QUICKSTART, ROOT, small_config
from safetensors.numpy import load_file

from headrace import Run, assemble
from headrace.algorithms.assemble import assemble_demonstrations
from headrace.config import load_config
from headrace.observe.progress import NoProgress
from headrace.pipeline.launch import start_run
from headrace.tasks.chat import ChatFormat
from headrace.tasks.dataset import load_prompts
from headrace.tasks.source import PromptSource
from headrace.types import Batch, Group, Prompt


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = []
    for name in ("one", "two"):
        config = small_config(
            tmp_path_factory.mktemp(name), "buffer.depth=0", "run.versions=5", "training.learning_rate=1e-3",
            "evaluate.every=2", "algorithm.loss=grpo",
        )  # fmt: skip
        paths.append(start_run(config, NoProgress()).run_dir.path)
    return paths


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    return load_file(Run(run_dir).model_dir / "model.safetensors")


def test_two_runs_end_with_bit_identical_weights(two_runs: list[Path]) -> None:
    one, two = map(weights, two_runs)
    assert one.keys() == two.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values.view(np.uint32), two[name].view(np.uint32), err_msg=name)
    digests = []
    for run_dir in two_runs:
        with sqlite3.connect(run_dir / "journal.db") as db:
            digests.append(db.execute("SELECT id, digest FROM versions ORDER BY id").fetchall())
    assert digests[0] == digests[1]
    assert len({digest for _, digest in digests[0]}) == 6, "every version has weights of its own"


def test_a_synchronous_run_has_no_lag(two_runs: list[Path]) -> None:
    summary = json.loads((two_runs[0] / "summary.json").read_text())
    assert (summary["lag_max"], summary["lag_bound"]) == (0, 0)


def test_losses_equal_a_plain_reference_loop(two_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests/unit/training"))
    from reference_loop import plain_model, reference_losses

    run_dir = two_runs[0]
    config = load_config(run_dir / "config.toml")
    with sqlite3.connect(run_dir / "journal.db") as db:
        recorded = dict(db.execute("SELECT step, loss FROM steps").fetchall())
        steps = dict(db.execute("SELECT id, step FROM groups").fetchall())
    batches = warm_start_batches(config) + recorded_batches(run_dir, config, steps)
    assert len(batches) == len(recorded) == 2 + 5
    losses = reference_losses(
        plain_model(config.model.path, weights="random", seed=config.run.seed),
        batches,
        config.algorithm,
        config.training,
        total_steps=config.run.versions,
        warm_start=config.warm_start,
    )
    np.testing.assert_allclose(losses, [recorded[batch.step] for batch in batches], atol=1e-5)


def recorded_batches(run_dir: Path, config, steps: dict[int, int]) -> list[Batch]:
    by_group: dict[int, list] = {}
    for rollout in Run(run_dir).rollouts():
        by_group.setdefault(int(rollout.id.split("/")[0]), []).append(rollout)
    batches = []
    for step in range(1, 6):
        groups = [
            Group(id=group_id, prompt=Prompt(id="-"), version=0, rollouts=by_group[group_id])
            for group_id, trained in steps.items()
            if trained == step
        ]
        batches.append(
            assemble(
                groups, step=step, version=step - 1, advantage="grpo", normalize="token", group_size=4, max_tokens=12,
                temperature=1.0,
            )
        )  # fmt: skip
    return batches


def warm_start_batches(config) -> list[Batch]:
    chat = ChatFormat.load(config.model.path)
    source = PromptSource(load_prompts(load_config(QUICKSTART).task.path), config.run.seed + 1)
    batches = []
    for step in (-1, 0):
        drawn = [source.draw() for _ in range(config.warm_start.batch)]
        pairs = [
            (
                chat.open(prompt.messages),
                np.append(chat.encode(prompt.data["demonstration"]), chat.end_token_id).astype(np.int32),
            )
            for prompt in drawn
        ]
        batches.append(assemble_demonstrations(pairs, step=step, version=0))
    return batches
